"""Stacks of every rank of a hung job, folded, and the rank that is not where the others are."""
