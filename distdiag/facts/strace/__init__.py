"""strace logs as facts: waits, errors and time spent, by thread."""
