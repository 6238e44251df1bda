"""Raw Pallas kernels and their launch configurations."""
