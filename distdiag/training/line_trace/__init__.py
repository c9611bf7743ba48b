"""The tracer of `distdiag trace py`: the last lines that each thread executed, in a file that outlives the process."""
