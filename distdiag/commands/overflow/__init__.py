"""`distdiag overflow`: the first nan or inf of a training run, and the growth that led to it."""
