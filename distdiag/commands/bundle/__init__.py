"""Everything about a stuck or broken job in one redacted file, for a ticket."""
