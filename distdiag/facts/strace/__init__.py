"""Logs of strace as facts: what each thread waited for, what failed, where the time went."""
