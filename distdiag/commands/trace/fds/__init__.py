"""`distdiag trace fds`: the targets of a process's file descriptors, and the owners of the other ends."""
