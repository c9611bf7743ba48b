"""floatcmp: how far apart two sets of tensors are, in ulp (units in the last place), and who is nearer to a reference.

`compare` is what scripts call, `ulp` counts the distances, `result` holds the answer and its text, without torch.
"""
