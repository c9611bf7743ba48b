"""Which processes of a node belong to which job, and which rank each of them is: for commands that look at jobs."""
