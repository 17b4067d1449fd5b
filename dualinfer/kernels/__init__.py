"""What each op means (`reference`) and, per toolchain, the kernels that do it fast."""
