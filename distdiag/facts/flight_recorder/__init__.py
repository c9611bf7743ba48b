"""Dumps of PyTorch's flight recorder, read where they lie."""
