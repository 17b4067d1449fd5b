"""Pallas kernels: a file per op, host functions named and shaped as in `kernels/reference.py`.

They are traced: what a kernel writes in place of its input (the cache, counters) comes back as a
result that is the same memory.
"""
