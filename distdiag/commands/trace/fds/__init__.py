"""`distdiag trace fds`: what the file descriptors of a process point to, and who has the other ends."""
