"""Module mode on torch: the caller's own module, filled, placed and split."""
