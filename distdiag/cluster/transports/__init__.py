"""How to start the node side on a host. A transport only gives the command to run."""
