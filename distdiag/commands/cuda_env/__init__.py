"""distdiag cuda-env: why does CUDA not build or run here."""
