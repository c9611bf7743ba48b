"""Writes lines in torn pieces, with a pause within some: its launcher's copy has lines of two ranks in one line.

The text depends on the rank alone. PAUSE=0 writes it at once.
"""

import os
import random
import time

rank = int(next(os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))
pause_s = float(os.environ.get("PAUSE", "0.12"))
random.seed(rank)
for number in range(30):
    long = "x" * random.choice((0, 3, 5000))
    words = ["step", str(number), f"loss: {random.random():.6f}", f"[rank{rank}]:", "  indented", long]
    random.shuffle(words)
    line = " ".join(words) + "\n" * (number < 29)
    at = random.randrange(len(line))
    torn = number % 6 == rank % 6
    for piece in (line[:at], line[at:]) if torn else (line,):
        os.write(1, piece.encode())
        if torn:
            time.sleep(pause_s * random.random() * 2)
