"""`trace show`: read what the tracer kept."""
