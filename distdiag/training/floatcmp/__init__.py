"""floatcmp: the distance of two sets of tensors in ulp (units in the last place), and which is nearer to a reference.

`compare` is the function for scripts, `tally` counts pairs, `ulp` measures distances, `result` is the answer and its
text, without torch.
"""
