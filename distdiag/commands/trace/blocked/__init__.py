"""`distdiag trace blocked`: the wait graph of a job, and the rank at its root."""
