"""allreduce-bench: bandwidth of collectives, honestly measured."""
