"""Ranks that train until their kill switch is on, for STEPS at most. Each writes to FOLDER the step at which it left.

Only rank 0 sees SWITCH; the path of the others leads nowhere, as with a stale cache. At step ON_AT rank 0 turns it on.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from job import RANK, join

from distdiag import KillSwitch

folder, steps = Path(os.environ["FOLDER"]), int(os.environ["STEPS"])
join()
try:
    seen_by_all = os.environ.get("ONLY_SEEN_BY", str(RANK)) == str(RANK)
    switch = KillSwitch(folder / ("switch" if seen_by_all else "elsewhere"), every=int(os.environ.get("EVERY", "1")))
    left_at = steps
    for step in range(steps):
        if switch.is_on():
            left_at = step
            break
        dist.all_reduce(torch.ones(4))
        if RANK == 0 and step == int(os.environ.get("ON_AT", "-1")):
            (folder / "switch").write_text("maintenance at noon\n")
    (folder / f"left-{RANK}").write_text(str(left_at))
finally:
    dist.destroy_process_group()
os._exit(0)  # at the usual exit, unloading torch takes longer than the job
