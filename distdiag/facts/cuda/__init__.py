"""CUDA on one machine as facts: read from files, without the driver."""
