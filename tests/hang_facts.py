"""Facts as nodes send them to `hang`, for tests of its verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyspy_facts as facts
from pyspy_facts import twice, waits
from trace_facts import at_futex

from distdiag.cluster.targets import Cluster
from distdiag.commands.hang.diagnose import diagnose
from distdiag.commands.hang.types import Request
from distdiag.facts.process.blocked_threads import Blocked
from distdiag.facts.process.procs import Standstill
from distdiag.jobs.part import SourceEnd
from distdiag.jobs.types import NodePicture
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.hang.types import Hang
    from distdiag.facts.process.activity import Activity
    from distdiag.facts.process.blocked_threads import Thread
    from distdiag.facts.stacks.stack_types import Sample
    from distdiag.report import Report

REQUEST = Request(program="distdiag", cluster=Cluster())
LONG = Standstill(1, "S", "futex_wait", "futex", "", 214.0)
ASLEEP = Standstill(1, "S", "hrtimer_nanosleep", "clock_nanosleep", "", 214.0)


def waiting(**more: Any) -> tuple[Sample, ...]:  # noqa: ANN401 - whatever a sample has
    return twice(waits(), still=LONG, groups=1, **more)


def node(*stacks: Sequence[Sample], **more: Any) -> NodePicture:  # noqa: ANN401 - the other fields
    found = facts.job(*stacks)
    ended = tuple(SourceEnd(name, 1.0) for name in ("stacks", "kernel", "ras"))
    return replace(
        NodePicture(host=found.host, processes=found.processes, watched=found.watched, ended=ended),
        **more,
    )


def with_blocked(picture: NodePicture, of: Thread, activity: Activity | None = None, **more: Any) -> NodePicture:  # noqa: ANN401
    """Add what /proc shows of all ranks: one main thread as given, the others in a futex."""
    watched = [replace(each, activity=activity) if each.pid == of.tid else each for each in picture.watched]
    threads = [of if each.pid == of.tid else at_futex(each.pid) for each in picture.processes.processes]
    return replace(
        picture,
        watched=tuple(watched),
        blocked=tuple(Blocked(each.tid, each.state, None, (each,), ()) for each in threads),
        ended=(*picture.ended, SourceEnd("waits", 1.0)),
        **more,
    )


def judge(*nodes: NodePicture) -> Report[Hang]:
    return diagnose(REQUEST, Gathered(facts=list(nodes)))


def fix_of(report: Report[Hang]) -> tuple[str, tuple[str, ...]]:
    fix = report.findings[0].fix
    assert fix is not None
    return fix.text, fix.commands
