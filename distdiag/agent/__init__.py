"""Code that runs on nodes: obeys orders, starts ranks, probes. Standard library only, Python 3.9+, sent as source."""
