"""Make the pictures of pages in docs/images, in a browser: `make pictures`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import chromium
from hang_facts import judge
from unit.commands.hang.test_hang_verdict import job_of

from distdiag.commands.hang.page import content
from distdiag.output import document
from distdiag.pages import make_page

IMAGES = Path(__file__).parents[1] / "docs" / "images"
RANKS, STUCK, CALLS = 8, 5, 12


def dump(rank: int) -> dict[str, object]:
    """Return a dump as torch 2.9 writes it; the stuck rank never made the last call."""
    calls = CALLS - (rank == STUCK)
    frame = {"name": "step", "filename": "/home/me/train.py", "line": 44}
    entries = [
        {
            **{"record_id": call, "collective_seq_id": call, "p2p_seq_id": 0, "op_id": call, "pg_id": 0},
            **{"process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce", "frames": [frame]},
            **{"input_sizes": ((1024,),), "output_sizes": ((1024,),), "input_dtypes": ("Float",)},
            **{"output_dtypes": ("Float",), "state": "completed" if call < CALLS else "scheduled", "is_p2p": False},
            **{"time_created_ns": 10**9 + call * 7_000_000, "timeout_ms": 600_000, "retired": call < CALLS},
        }
        for call in range(1, calls + 1)
    ]
    group = {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}
    return {"version": "2.9", "entries": entries, "pg_config": {"0": group}, "pg_status": {}}


def pages(folder: Path) -> dict[str, Path]:
    """Write the pages that are shown."""
    hang = folder / "hang.html"
    report = document(judge(*job_of(RANKS, 2, STUCK)), strict=False)
    hang.write_text(make_page(report, content), encoding="ascii")
    dumps, recorder = folder / "dumps", folder / "recorder.html"
    dumps.mkdir()
    for rank in range(RANKS):
        (dumps / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(rank), protocol=2))
    command = ["distdiag", "flight-recorder", str(dumps), "--html", str(recorder)]  # by name: no path of this machine
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, env=environment, check=False, capture_output=True)
    return {"hang-page": hang, "flight-recorder-page": recorder}


def main() -> None:
    """Take the pictures."""
    with chromium() as driver, tempfile.TemporaryDirectory() as folder:
        for name, page in pages(Path(folder)).items():
            size = {"width": 1280, "height": 620, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.get(page.as_uri())
            driver.save_screenshot(str(IMAGES / f"{name}.png"))


if __name__ == "__main__":
    main()
