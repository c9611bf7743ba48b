"""The command logs."""
