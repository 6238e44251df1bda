"""Portable kernels in Mosaic GPU on mma: every NVIDIA GPU of compute capability 8.0 or more, Hopper included."""
