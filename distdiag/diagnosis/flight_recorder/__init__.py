"""What the dumps of a flight recorder come to."""
