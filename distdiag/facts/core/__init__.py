"""Core files as facts: read from their notes and headers, without a debugger."""
