"""distdiag demo."""
