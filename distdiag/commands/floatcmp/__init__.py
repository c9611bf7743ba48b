"""distdiag floatcmp: are two files of tensors the same numbers, but for rounding?"""
