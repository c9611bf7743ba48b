"""What the logs of a job report, read where they lie."""
