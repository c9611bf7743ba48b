"""Assignment of a node's processes to jobs and ranks."""
