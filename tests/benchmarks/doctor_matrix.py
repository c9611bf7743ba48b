"""Whether doctor names the changed node and fact, and no node if nothing was changed; and its run time.

    python tests/benchmarks/doctor_matrix.py [--changes memlock,mtu] [--unchanged 10] [--nodes 4] [--slurm 64]

Each change is made for real on one of 4 network namespaces (see tests/doctor_changes.py). With --slurm N, a SLURM of N
nodes is started, and doctor is timed in an allocation of all: all alive, then with the daemon of one node stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cluster import Network
from cluster_slurm import Slurm
from doctor_changes import CHANGES, can_limit_memory, complaints
from support import PROGRAM

CHANGED = "node3"


def doctor(network: Network, *more: str) -> tuple[dict[str, Any], float]:
    """Run doctor on all nodes of a network: its report, and the seconds it took."""
    began = time.monotonic()
    where = ("--hosts", network.hosts, "--via", network.via)
    done = network.client.run(PROGRAM, "doctor", "--json", *where, *more, check=False, timeout=120)
    document: dict[str, Any] = json.loads(done.stdout)
    return document, time.monotonic() - began


def matrix(nodes: int, names: list[str], unchanged: int) -> bool:
    """Print a line for each change and run, and the sums."""
    named = 0
    quiet = 0
    with Network(nodes) as network:
        for _ in range(unchanged):
            report, seconds = doctor(network)
            found = complaints(report)
            quiet += not found
            print(json.dumps({"change": None, "complaints": found, "seconds": round(seconds, 1)}), flush=True)
        for name in names:
            change = CHANGES[name]
            with change.make(network, network[CHANGED]):
                report, seconds = doctor(network)
            is_named = change.named(report, CHANGED)
            named += is_named
            others = [f["where"]["hosts"] for f in report["findings"] if f["level"] in ("fail", "warn")]
            row = {
                "change": name,
                "named": is_named,
                "others accused": sorted({host for hosts in others for host in hosts} - {CHANGED}),
                "verdict": report["verdict"],
                "exclude": (report.get("data") or {}).get("exclude"),
                "findings": [f["title"] for f in report["findings"] if f["level"] != "info"],
                "seconds": round(seconds, 1),
            }
            print(json.dumps(row), flush=True)
    print(f"named: {named} of {len(names)}; without a change nothing said: {quiet} of {unchanged}")
    return named == len(names) and quiet == unchanged


def on_slurm(count: int) -> None:
    """Time doctor on a SLURM cluster of N nodes, then with one node dead."""
    with Slurm(count, cpus=1) as slurm:
        job = slurm.allocate(count)
        for dead in (False, True):
            if dead:
                slurm.freeze_slurmd(f"mn{count // 2}")
            began = time.monotonic()
            done = slurm.run(PROGRAM, "doctor", "--json", "--slurm-job", str(job), check=False, timeout=300)
            report = json.loads(done.stdout)
            row = {
                "nodes": count,
                "dead": dead,
                "seconds": round(time.monotonic() - began, 1),
                "verdict": report["verdict"],
                "summary": report["summary"],
                "nodes with facts": len(report["data"]["nodes"]),
            }
            print(json.dumps(row), flush=True)
        slurm.thaw_slurmd(f"mn{count // 2}")


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", default="all")
    parser.add_argument("--unchanged", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--slurm", type=int, default=0)
    options = parser.parse_args()
    names = list(CHANGES) if options.changes == "all" else [name for name in options.changes.split(",") if name]
    if not can_limit_memory():
        names = [name for name in names if name != "cgroup-memory"]
    good = matrix(options.nodes, names, options.unchanged) if names or options.unchanged else True
    if options.slurm:
        on_slurm(options.slurm)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
