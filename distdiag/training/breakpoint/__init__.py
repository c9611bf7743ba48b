"""pdb for one rank of many: `debugger` has the API; `console` also reaches a rank without a terminal."""
