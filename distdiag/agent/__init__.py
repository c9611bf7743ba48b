"""What runs on a node: it obeys orders, starts ranks, probes. Standard library only, Python 3.9+; it travels."""
