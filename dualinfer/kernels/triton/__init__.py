"""Triton kernels: a file per op, host functions named and shaped as in `ops/`.

They take torch tensors, but import no torch when they are loaded; or operands, in place of arrays
of a framework that must know a step before it runs (`operands.py`).
"""
