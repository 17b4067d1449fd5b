"""Checkpoints on disk: found, read by parts and written."""
