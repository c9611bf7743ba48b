"""Work on ranks: what gpu-test and allreduce-bench share, from the plan to the report of how the ranks fared."""
