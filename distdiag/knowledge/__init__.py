"""What distdiag knows, as data with sources: lines of logs, GPUs, drivers, bandwidths, crashes, advisories."""
