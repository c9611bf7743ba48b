"""`distdiag trace blocked`: who is blocked on what, and which rank all of them wait for."""
