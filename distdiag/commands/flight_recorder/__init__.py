"""`distdiag flight-recorder`: the last collectives of every rank, matched, to find stuck ranks."""
