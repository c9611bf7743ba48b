"""distdiag estimate: the speed of a training run, and the network that it needs."""
