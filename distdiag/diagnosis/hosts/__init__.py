"""Findings on the hosts themselves: not reached, or different from the others. Pure."""
