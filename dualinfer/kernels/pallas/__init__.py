"""Kernels in Pallas, for TPUs by JAX's Mosaic lowering; `interpret` runs them on any device.

Each file has one kernel. A function of it takes JAX arrays, under `jax.jit` too, checks nothing of
their values, and calls `launch.run`, which counts what the kernel holds in fast memory.
"""
