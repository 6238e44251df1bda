"""Raw kernels for TPUs, in Pallas's Mosaic TPU dialect, with their launch configs."""
