"""`distdiag overflow`: where the first nan or inf of a training run comes from, and how the numbers came there."""
