"""Records of a job's own: flight recorder, NCCL RAS, line traces."""
