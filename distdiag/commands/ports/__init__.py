"""distdiag ports: can the nodes reach each other, on which interface, in both directions."""
