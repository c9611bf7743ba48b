"""Facts of one machine, collected on a node. Standard library only, Python 3.9+, sent as source."""
