"""Dumps of PyTorch's flight recorder, read on the node that wrote them."""
