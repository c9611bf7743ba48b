"""What the logs of a job come to."""
