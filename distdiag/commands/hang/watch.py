"""hang --watch: poll /proc, and diagnose once the job stops making progress."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.hang.diagnose import asked_of
from distdiag.commands.hang.types import COMMAND
from distdiag.diagnosis.stuck.evidence import gather_evidence
from distdiag.diagnosis.wait_reasons import Kind
from distdiag.jobs.roles import find_jobs, is_called, of_interest
from distdiag.output import Progress, fail
from distdiag.report import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.commands.hang.types import Request
    from distdiag.diagnosis.process_index import Key
    from distdiag.jobs.types import Job, NodePicture


class _Readings(Progress):
    """Progress without a log line per reading, one a minute."""

    def news(self, text: str) -> None:
        """Show the current reading, on a terminal only."""
        self.now(text)

    def report(self, text: str) -> None:
        """Report the result of the readings."""
        super().news(text)


def wait_until_hung(asked: Callable[[], Request], every_s: float, *, as_json: bool = False) -> None:
    """Return when a job hangs, or when all of its ranks have exited.

    A reading of /proc is cheap; the full picture is taken once half of a job's ranks have slept for a whole interval.
    If that shows no hang, such as one rank at work for the others, polling continues.
    """
    from distdiag.commands.hang.subcommand import SUBCOMMAND
    from distdiag.errors import DistdiagError

    try:
        request = asked()
        with _Readings() as progress:
            was_there = False
            while True:
                began = time.monotonic()
                gathered = SUBCOMMAND.collect(replace(request, light=True), progress)
                jobs = _jobs(request, gathered.facts)
                is_there = bool(gathered.refusals) or _is_seen(jobs, gathered.facts)
                if still := _still_ranks(request, jobs, gathered.facts, every_s):
                    progress.report(f"{len(still)} ranks made no progress for {every_s:g} s: taking the full picture")
                    found = SUBCOMMAND.diagnose(request, SUBCOMMAND.collect(request, progress))
                    if found.verdict is Verdict.FAIL:
                        return
                    progress.report(f"no hang yet: {found.summary}; watching on")
                if was_there and not is_there:
                    progress.report("no rank is left: taking the full picture")
                    return
                if is_there and not was_there:
                    progress.report(f"watching, a reading every {every_s:g} s: it ends when the job hangs")
                progress.now("the job makes progress" if is_there else "no rank found so far")
                was_there = was_there or is_there
                time.sleep(max(0.0, every_s - (time.monotonic() - began)))
    except DistdiagError as error:
        fail(COMMAND, error, as_json=as_json)


def _jobs(request: Request, nodes: Sequence[NodePicture]) -> list[Job]:
    """Return the watched jobs: a node without the job of --job reports all of its jobs."""
    found = find_jobs([node.stacks for node in nodes])
    return of_interest([job for job in found if not request.wanted.job or is_called(job, request.wanted.job)])


def _is_seen(jobs: Sequence[Job], nodes: Sequence[NodePicture]) -> bool:
    seen = {(node.host, process.pid) for node in nodes for process in node.blocked}
    members = (member for job in jobs for member in job.members if member.process is not None)
    return any((member.host, member.pid) in seen for member in members)


def _still_ranks(request: Request, jobs: Sequence[Job], nodes: Sequence[NodePicture], least_s: float) -> frozenset[Key]:
    """Return the ranks whose main thread has slept for at least `least_s`, if at least half of a job; else none."""
    found: set[Key] = set()
    for job in jobs:
        evidence = gather_evidence(asked_of(request), nodes, job, alone=False)
        waits = {key: evidence.graph.main(key) for key in evidence.keys}
        still = {
            key
            for key, wait in waits.items()
            if wait is not None and wait.kind is not Kind.RUNS and (wait.since_s or 0.0) >= least_s
        }
        if still and len(still) * 2 >= len(waits):
            found |= still
    return frozenset(found)
