"""Stacks of every rank of a hung job, folded, and the stuck ranks."""
