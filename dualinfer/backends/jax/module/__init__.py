"""Module mode on JAX: the caller's own Flax module, cast, placed and compiled."""
