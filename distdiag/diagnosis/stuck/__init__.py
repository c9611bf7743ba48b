"""Diagnosis of stuck jobs: sources, claims, and the one verdict of hang, pyspy-all and trace blocked."""
