"""Facts about CUDA on one machine, read from files, without the driver."""
