"""The fused ops on torch: plain, by kernels, and split over ranks."""
