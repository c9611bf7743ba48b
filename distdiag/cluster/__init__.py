"""Where a collect runs: how the node side of distdiag gets to a host, and how ranks are run on hosts."""
