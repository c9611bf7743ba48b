"""distdiag core-bt: explain crashes, from core files or a live process."""
