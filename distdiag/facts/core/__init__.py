"""Core files, parsed from their notes and headers without a debugger."""
