"""One package per subcommand: command, collect, diagnose, view, and rank for code run by ranks."""
