"""distdiag core-bt: what crashed and why, from core files or a live process."""
