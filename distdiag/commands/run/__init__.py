"""distdiag run: start a job so that its first error is never lost."""
