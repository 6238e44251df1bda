"""What raw kernels are made of, on jax and numpy alone: the bits of dropout and the arithmetic of launch grids."""
