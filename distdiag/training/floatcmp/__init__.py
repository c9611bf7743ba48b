"""floatcmp: the distance of two sets of tensors in ulp, and which is nearer to a reference."""
