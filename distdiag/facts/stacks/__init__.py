"""Stacks of live processes: Python frames, and libraries of native ones."""
