"""`overflow show`: read the frames that the detector of overflow kept."""
