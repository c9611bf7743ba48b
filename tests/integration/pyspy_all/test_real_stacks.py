"""Who is stuck on the stacks that people train on: never an innocent rank, and a job that goes on is not hung."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from jobs import Job, JobServer
from support_warm import WarmRunning
from torch_builds import BUILDS, PYTHONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from support import Result


@dataclass(frozen=True)
class Case:
    stack: str
    fault: str
    verdict: str
    words: str
    """What pyspy-all says, in its first finding."""
    ranks: tuple[int, ...] = (2,)


HUNG = [
    Case("fsdp2", "sleep", "fail", "is not in the collective: `sleep_in_step`"),
    Case("tensor-parallel", "sleep", "fail", "Ranks 0-1,3 have waited for "),
    Case("thread", "sleep", "fail", "(thread trainer)"),
    Case("module", "debugger", "fail", "in the debugger, waiting for input"),
    Case("checkpoint", "sleep", "fail", "`write_shard`"),
    Case("module", "compile", "fail", "`slow_backend`"),
    Case("module", "barrier", "fail", "rank 2"),
    Case("mesh", "barrier-of-one-group", "unknown", "`barrier`", ()),
    Case("pairs", "circle", "fail", "rank 2 waits in `recv` from rank 3", (2, 3)),
]
HEALTHY = ["fsdp2", "tensor-parallel", "asyncio", "mesh", "pairs", "module", "pause"]
OF_A_MODULE = ("module", "pause")
"""Loops outside of functions: the variables of a module are not compared, so that progress may not be seen."""
TRACED = ("thread", "asyncio", "mesh", "pairs", "pause")
"""Those on which trace blocked is run, too: it judges as pyspy-all does, from the same sources."""


@pytest.fixture(scope="module", params=PYTHONS, ids=BUILDS)
def server(request: pytest.FixtureRequest) -> Iterator[JobServer | None]:
    """Return who starts jobs on another torch; None: they are forked from a process that has this one."""
    if request.param == sys.executable:
        yield None
        return
    with JobServer("trains_on_a_stack", request.param) as server:
        yield server


def job_of(stack: str, fault: str, server: JobServer | None) -> Job:
    return Job("trains_on_a_stack", 4, env={"STACK": stack, "FAULT": fault}, forked=True, server=server)


def ask(jobs: Mapping[Job, bool]) -> list[list[Result]]:
    """Run pyspy-all and, where so marked, trace blocked, all at once: they mostly wait between samples."""
    commands = {False: (("pyspy-all",),), True: (("pyspy-all",), ("trace", "blocked"))}
    asked = [
        [WarmRunning(*command, "--json", "--job", job.name) for command in commands[both]] for job, both in jobs.items()
    ]
    return [[each.finish() for each in of_job] for of_job in asked]


def named(result: Result) -> set[int]:
    return {
        rank for one in result.report["findings"] if one["level"] in ("fail", "warn") for rank in one["where"]["ranks"]
    }


@pytest.mark.parametrize(
    "cases", [HUNG[:3], HUNG[3:6], HUNG[6:]], ids=lambda cases: "-".join(f"{case.stack}-{case.fault}" for case in cases)
)
def test_the_rank_that_holds_the_others_up_is_named_and_no_other(cases: list[Case], server: JobServer | None) -> None:
    with ExitStack() as ends:
        jobs = [ends.enter_context(job_of(case.stack, case.fault, server)) for case in cases]
        for job in jobs:
            job.wait_still()
        asked = ask({job: case.stack in TRACED for job, case in zip(jobs, cases, strict=True)})
    for case, (result, *blocked) in zip(cases, asked, strict=True):
        assert (result.report["verdict"], named(result)) == (case.verdict, set(case.ranks)), (case, result.out)
        first = result.report["findings"][0]
        assert case.words in "\n".join([first["title"], first["detail"], *first["evidence"]])
        # It is often unknown, but never another rank.
        assert all(named(each) <= set(case.ranks) for each in blocked), (case, blocked)


@pytest.mark.parametrize("stack", HEALTHY)
def test_a_job_that_goes_on_accuses_nobody(stack: str, server: JobServer | None) -> None:
    with job_of(stack, "", server) as job:
        job.wait_ready()
        (results,) = ask({job: stack in TRACED})
        looked = results[0]
        if looked.report["verdict"] == "unknown":  # a rank that a busy machine hid
            results.append(looked := job.look())
    assert [named(result) for result in results] == [set()] * len(results), results
    assert looked.report["verdict"] in (("ok", "unknown") if stack in OF_A_MODULE else ("ok",)), results


def test_a_rank_that_takes_three_seconds_for_each_step_may_only_be_slow(server: JobServer | None) -> None:
    with job_of("module", "slow", server) as job:
        job.wait_ready()
        ((result, blocked),) = ask({job: True})
        # If another is named: whether it hangs itself, as in torch or Python.
        stacks = job.native_stacks() if named(result) - {2} else ""
    assert result.report["verdict"] in ("ok", "warn"), (result.out, stacks)
    assert named(result) <= {2}, (result.out, stacks)
    assert blocked.report["verdict"] != "fail"
