"""Reference data with sources: known log lines, GPUs, drivers, bandwidths, crashes, advisories."""
