"""Ranks on many hosts, for gpu-test and allreduce-bench: from the plan to the report of a run."""
