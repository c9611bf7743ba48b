"""How long hang judges saved facts of large jobs, and how much memory that takes.

    python tests/benchmarks/hang_scale.py [RANKS ...]

8 ranks a node, one of them stuck, one node dead, one node whose RAS answer accuses another rank.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS)]
from hang_facts import REQUEST  # noqa: E402
from unit.commands.hang.test_hang_verdict import job_of, ras  # noqa: E402 - the tests are no package

from distdiag.cluster.host_results import HostError, HostResult, HostState  # noqa: E402
from distdiag.commands.hang.types import COMMAND  # noqa: E402
from distdiag.saved_facts import Gathered, save  # noqa: E402

STUCK, STUCK_ON = 777, "n0097"


def main() -> None:
    """Measure each size."""
    for ranks in map(int, sys.argv[1:] or ["1024", "4096", "16384"]):
        nodes = job_of(ranks, ranks // 8, STUCK)
        nodes = [replace(node, ras=(ras(STUCK_ON, 3 if number == 9 else 1),)) for number, node in enumerate(nodes)]
        dead, nodes = nodes[-1].host, nodes[:-1]
        refusal = HostError(state=HostState.TIMEOUT, stage="connect", message="no answer", hint="")
        row = HostResult(host=dead, state=HostState.TIMEOUT, stage="connect", message="no answer", seconds=10.0)
        with tempfile.TemporaryDirectory() as folder:
            save(folder, COMMAND, REQUEST, Gathered(facts=nodes, refusals={dead: refusal}, rows=(row,)))
            began = time.monotonic()
            command = [sys.executable, "-m", "distdiag", "hang", "--from", folder, "--json"]
            done = subprocess.run(command, capture_output=True, check=False)
            seconds = time.monotonic() - began
        found = json.loads(done.stdout)
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
        print(ranks, "ranks:", f"{seconds:.1f} s, {memory} MiB,", found["verdict"], found["findings"][0]["title"])
        print({row["source"]: row["stand"] for row in found["data"]["sources"]})


if __name__ == "__main__":
    main()
