"""How far apart two sets of numbers are, in units in the last place; floatcmp is what scripts call."""
