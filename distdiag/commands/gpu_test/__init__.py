"""`distdiag gpu-test`: can all ranks talk, reduce correctly and use their memory; if not, which one, and why."""
