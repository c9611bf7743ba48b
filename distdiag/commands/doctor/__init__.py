"""doctor: check limits, disks, clocks, network, GPUs and versions of all nodes, and compare the nodes."""
