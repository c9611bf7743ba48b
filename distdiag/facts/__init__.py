"""What is read on a node: one machine as facts. Standard library only, Python 3.9+; it travels."""
