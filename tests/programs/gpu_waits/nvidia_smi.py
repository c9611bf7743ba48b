"""Answers as nvidia-smi does for the GPUs of cuda.c: a GPU for each rank, all queries as CSV without a header."""

from __future__ import annotations

import os
import subprocess
import sys

LIMIT_W = 700


def main() -> None:
    asked = {word.partition("=")[0]: word.partition("=")[2] for word in sys.argv[1:]}
    shown = subprocess.run([os.environ["GPUS_PROGRAM"], "show"], capture_output=True, text=True, check=True).stdout
    units = "nounits" not in asked.get("--format", "")
    for line in shown.splitlines():
        rank, pid, _, _, busy, watts = line.split()[:6]
        known = {
            **{"index": rank, "uuid": f"GPU-{int(rank):08x}-5a1e", "gpu_uuid": f"GPU-{int(rank):08x}-5a1e", "pid": pid},
            **{"name": "NVIDIA H100 80GB HBM3", "utilization.gpu": busy + units * " %"},
            **{"power.draw": watts + units * " W", "enforced.power.limit": f"{LIMIT_W}.00" + units * " W"},
            **{"power.limit": f"{LIMIT_W}.00" + units * " W", "memory.used": "61234" + units * " MiB"},
        }
        query = asked.get("--query-gpu") or asked.get("--query-compute-apps")
        if not query:
            raise SystemExit("only --query-gpu and --query-compute-apps are played")
        print(", ".join(known.get(field, "[N/A]") for field in query.split(",")))


main()
