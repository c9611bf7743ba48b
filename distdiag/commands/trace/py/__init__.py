"""`trace py`: run a job with the tracer inside."""
