"""`distdiag gpu-test`: whether all ranks can communicate, reduce, compute and use their memory, and which fails."""
