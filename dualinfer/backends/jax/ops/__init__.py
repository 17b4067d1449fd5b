"""The fused ops on JAX: plain, by kernels, and split over devices."""
