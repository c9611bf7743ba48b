"""Which reason hang names for a job that does not start: torchrun and plain ranks on three nodes of a test network.

    python tests/benchmarks/start_matrix.py [--only name-c10d,run-id] [--settle 15] [--out FILE]

Each fault of tests/start_faults.py is asked on one node and on all nodes. Right: the reason is in the first title and
no other node is accused; on one node, a warning that names its side of the fault. Needs root.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
from cluster import Network  # noqa: E402 - the tests are no package
from start_faults import FAULTS, ask, logs_of, read_logs, score, score_log, start  # noqa: E402


def main() -> None:
    """Run all faults, one at a time; print a JSON line for each answer, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--settle", type=float, default=15.0, help="seconds from the start to the question")
    parser.add_argument("--out", default="")
    parser.add_argument("--logs", action="store_true", help="let each job give up, and ask `logs` about its output")
    options = parser.parse_args()
    if options.logs:
        _ask_logs(options.only.split(","))
        return
    rows = []
    for name in options.only.split(","):
        with Network(3, names=FAULTS[name].names) as network:
            node = start(FAULTS[name], network)
            time.sleep(options.settle)
            for where in (node, None):
                began = time.monotonic()
                report = ask(network, where)
                row = {
                    "fault": name,
                    "asked": where.name if where is not None else "all",
                    "score": score(FAULTS[name], report, alone=where is not None),
                    "verdict": report["verdict"],
                    "exit": report["exit"],
                    "seconds": round(time.monotonic() - began, 1),
                    "titles": [finding["title"] for finding in report["findings"]],
                    "fixes": [finding["fix"] for finding in report["findings"]],
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    for asked, of in (
        ("one node", [row for row in rows if row["asked"] != "all"]),
        ("all nodes", [row for row in rows if row["asked"] == "all"]),
    ):
        print(f"asked on {asked}: {dict(Counter(row['score'] for row in of))} of {len(of)}")
    if options.out:
        Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _ask_logs(names: list[str]) -> None:
    scores: Counter[str] = Counter()
    for name in names:
        with Network(3, names=FAULTS[name].names) as network:
            files = logs_of(FAULTS[name], network, patience_s=120)
            report = read_logs(files)
            found = score_log(name, report)
            last = [next(iter(file.read_text().strip().splitlines()[-1:]), "") for file in files]
            titles = [finding["title"] for finding in report["findings"]]
        scores[found] += 1
        row = {"fault": name, "score": found, "verdict": report["verdict"], "titles": titles, "launcher_says": last}
        print(json.dumps(row), flush=True)
    print(f"logs: {dict(scores)} of {len(names)}")


if __name__ == "__main__":
    main()
