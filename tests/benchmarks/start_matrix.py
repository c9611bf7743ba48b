"""Which reason hang names for a job that does not start: torchrun and plain ranks on three nodes of a test network.

    python tests/benchmarks/start_matrix.py [--only name-c10d,run-id] [--settle 15] [--out FILE]

Each fault of tests/start_faults.py, and of tests/start_srun.py on a real SLURM, is asked on one node and on all nodes.
Right: the first finding names the reason, and the nodes at fault alone are accused; next: only the command that decides
is named. Needs root, and accelerate and deepspeed beside torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
import start_srun  # noqa: E402
from cluster import Network  # noqa: E402 - the tests are no package
from cluster_slurm import Slurm  # noqa: E402
from start_faults import FAULTS, ask, logs_of, read_logs, score, score_log, score_words, start  # noqa: E402
from start_srun import SRUN_FAULTS, SrunFault  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


def main() -> None:
    """Run all faults, one at a time; print a JSON line for each answer, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*FAULTS, *SRUN_FAULTS]))
    parser.add_argument("--settle", type=float, default=15.0, help="seconds from the start to the question")
    parser.add_argument("--out", default="")
    parser.add_argument("--logs", action="store_true", help="let each job give up, and ask `logs` about its output")
    options = parser.parse_args()
    rows = []
    for name in options.only.split(","):
        asked = _logs(name) if options.logs else _live(name, options.settle)
        for where, found, report, more in asked:
            row = {
                **{"fault": name, "asked": where, "score": found, "verdict": report["verdict"], "exit": report["exit"]},
                **{"findings": report["findings"], **more},
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    for asked_of in ("one", "all", "logs"):
        of = [row for row in rows if row["asked"] == asked_of]
        print(f"{asked_of}: {dict(Counter(row['score'] for row in of))} of {len(of)}")
    if options.out:
        Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in rows))


Answer = tuple[str, str, dict[str, Any], dict[str, Any]]
"""Who was asked, the score, the report, and more for the row."""


def _live(name: str, settle_s: float) -> Iterator[Answer]:
    if name in SRUN_FAULTS:
        yield from _live_srun(SRUN_FAULTS[name], settle_s)
        return
    with Network(3, names=FAULTS[name].names) as network:
        node = start(FAULTS[name], network)
        time.sleep(settle_s)
        for where in (node, None):
            began = time.monotonic()
            report = ask(network, where)
            seconds = {"seconds": round(time.monotonic() - began, 1)}
            found = score(FAULTS[name], report, alone=where is not None)
            yield "all" if where is None else "one", found, report, seconds


def _live_srun(fault: SrunFault, settle_s: float) -> Iterator[Answer]:
    with Slurm(3) as slurm:
        start_srun.start(fault, slurm)
        time.sleep(settle_s)
        culprits = [f"mn{number + 1}" for number in fault.culprits]
        for asked, where in (("one", f"mn{fault.tasks}"), ("all", "all")):
            report = start_srun.ask(slurm, where)
            words = fault.alone if asked == "one" and fault.alone else fault.words
            yield asked, score_words(words, culprits, report, alone=asked == "one"), report, {}


def _logs(name: str) -> Iterator[Answer]:
    with Slurm(3) if name in SRUN_FAULTS else Network(3, names=FAULTS[name].names) as bed:
        if isinstance(bed, Slurm):
            files = [start_srun.log_of(SRUN_FAULTS[name], bed)]
        else:
            files = logs_of(FAULTS[name], bed, patience_s=120)
        report = read_logs(files)
        last = [file.read_text().strip().splitlines()[-1:] for file in files]
    fault = SRUN_FAULTS.get(name)
    yield "logs", score_words(fault.log, (), report) if fault else score_log(name, report), report, {"last": last}


if __name__ == "__main__":
    main()
