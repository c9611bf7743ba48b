"""GPUs by the vendors' tools, and the results of a rank's device."""
