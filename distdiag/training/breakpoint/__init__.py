"""pdb for one rank of many: `debugger` has what a script calls; `connect` is for who has not the rank's terminal."""
