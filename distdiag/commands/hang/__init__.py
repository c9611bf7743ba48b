"""The command hang."""
