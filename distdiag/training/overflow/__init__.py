"""The first bad number of a training run: its rank, step, module and tensor. detector.py is the door."""
