"""Checkpoints of other systems, and parts of tensors put together."""
