"""Events in the logs of a job, extracted on the node that has the files."""
