"""Limits, file systems, PCIe and kernel log of a node."""
