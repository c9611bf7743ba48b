"""Processes from /proc: identity, counters, threads and descriptors, and what each waits for."""
