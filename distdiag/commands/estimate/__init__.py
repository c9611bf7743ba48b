"""distdiag estimate: the speed of a training run, and what it asks of the network."""
