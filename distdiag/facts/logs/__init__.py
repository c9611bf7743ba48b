"""Logs of jobs: their files, lines and events."""
