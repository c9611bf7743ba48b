"""Which rank holds up a stuck job: sources, what each claims, and the one verdict of hang, pyspy-all, trace blocked."""
