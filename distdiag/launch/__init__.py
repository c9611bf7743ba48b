"""Ranks on many hosts: what gpu-test and allreduce-bench share, from the plan to the report of a run."""
