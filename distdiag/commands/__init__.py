"""One package for each subcommand, all of one shape: command, collect, diagnose, view, and rank where ranks run."""
