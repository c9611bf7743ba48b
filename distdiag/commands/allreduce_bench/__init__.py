"""allreduce-bench: measure and judge the bandwidth of collectives."""
