"""Kernels in Pallas, by the lowerings that JAX keeps; `interpret` runs them on any device.

Each file has one kernel, a function of JAX arrays, under `jax.jit` too. Those for TPUs call
`launch.run`, which counts what they hold in fast memory; `ring` is for NVIDIA's GPUs, whose
lowering has other memories and sums.
"""
