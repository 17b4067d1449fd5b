"""Kernels that do fast what `ops/` means, and how each framework launches them."""
