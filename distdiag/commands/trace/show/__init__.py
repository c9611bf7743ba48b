"""`trace show`: read the tracer's files."""
