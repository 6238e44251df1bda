"""Mosaic GPU kernels for Hopper (compute capability 9.0): wgmma, tensor memory copies, warp specialisation."""
