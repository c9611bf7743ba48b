"""`distdiag flight-recorder`: the last collectives of every rank, matched: who is stuck, and why."""
