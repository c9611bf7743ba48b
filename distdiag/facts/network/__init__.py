"""Sockets, ports, interfaces and links of a node."""
