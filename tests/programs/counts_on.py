"""Counts without end, and writes how far it is into JOB_FOLDER/count; a rank is who has RANK in its environment."""

from __future__ import annotations

import os
import time
from pathlib import Path

from job import ready

with open(Path(os.environ["JOB_FOLDER"], "count"), "wb", buffering=0) as file:
    ready()
    number = 0
    while True:
        number += 1
        os.pwrite(file.fileno(), b"%12d" % number, 0)
        time.sleep(0.001)
