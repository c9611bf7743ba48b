"""`distdiag trace`: system calls and Python lines of every rank, live or afterwards."""
