"""The sections of the report: each module judges one node's facts. Pure."""
