"""`trace sys`: the system calls of every rank, by strace."""
