"""hang --watch: ask /proc alone from time to time, and say when ranks make no progress any more."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.hang.claims import gather_evidence, watched_nodes
from distdiag.commands.hang.types import COMMAND
from distdiag.diagnosis.wait_reasons import Kind
from distdiag.jobs.roles import find_jobs, of_interest
from distdiag.output import Progress, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.commands.hang.types import NodeHang, Request


class _Readings(Progress):
    """Of each reading, and there is one a minute, nothing stays in a log."""

    def news(self, text: str) -> None:
        """Show what a reading does; only on a terminal."""
        self.now(text)

    def report(self, text: str) -> None:
        """Report what the readings come to."""
        super().news(text)


def wait_until_still(asked: Callable[[], Request], every_s: float, *, as_json: bool = False) -> None:
    """Return when at least half of the ranks of a job have slept for longer than between two readings, or all left."""
    from distdiag.commands.hang.subcommand import SUBCOMMAND
    from distdiag.errors import DistdiagError

    try:
        request = replace(asked(), light=True)
        with _Readings() as progress:
            was_there = False
            while True:
                began = time.monotonic()
                gathered = SUBCOMMAND.collect(request, progress)
                is_there = bool(gathered.refusals) or any(node.blocked for node in gathered.facts)
                if still := still_ranks(request, gathered.facts, every_s):
                    progress.report(f"{len(still)} ranks made no progress for {every_s:g} s: taking the full picture")
                    return
                if was_there and not is_there:
                    progress.report("no rank is left: taking the full picture")
                    return
                if is_there and not was_there:
                    progress.report(f"watching, a reading every {every_s:g} s: it ends when no rank makes progress")
                progress.now("the job makes progress" if is_there else "no rank found so far")
                was_there = was_there or is_there
                time.sleep(max(0.0, every_s - (time.monotonic() - began)))
    except DistdiagError as error:
        fail(COMMAND, error, as_json=as_json)


def still_ranks(request: Request, nodes: Sequence[NodeHang], least_s: float) -> frozenset[tuple[str, int]]:
    """Return the ranks whose main thread has slept for so long, if they are at least half of a job; else none."""
    found: set[tuple[str, int]] = set()
    for job in of_interest(find_jobs(watched_nodes(nodes))):
        evidence = gather_evidence(request, nodes, job, alone=False)
        waits = {key: evidence.graph.main(key) for key in evidence.case.keys}
        still = {
            key
            for key, wait in waits.items()
            if wait is not None and wait.kind is not Kind.RUNS and (wait.since_s or 0.0) >= least_s
        }
        if still and len(still) * 2 >= len(waits):
            found |= still
    return frozenset(found)
