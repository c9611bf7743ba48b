"""Access to hosts: start the agent on each, and run ranks there."""
