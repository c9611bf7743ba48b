"""Is this cluster fit to start: limits, disks, clocks, network, GPUs and versions of all nodes, and who differs."""
