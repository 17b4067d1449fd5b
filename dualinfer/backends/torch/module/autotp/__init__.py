"""Tensor parallelism of a caller's own module: what each layer becomes, tried before it is made."""
