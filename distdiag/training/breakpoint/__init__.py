"""pdb for one rank of many: `debugger` has what a script calls; `console` also reaches a rank without a terminal."""
