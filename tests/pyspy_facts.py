"""Facts in the form sent by nodes, for tests of conclusions from them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.targets import Cluster
from distdiag.commands.pyspy_all.diagnose import diagnose
from distdiag.commands.pyspy_all.types import Request
from distdiag.facts.process.rank_identity import Identity
from distdiag.facts.stacks.stack_types import Counter, Frame, Sample, Thread
from distdiag.jobs.collect import Process, Processes, Watched
from distdiag.jobs.part import SourceEnd
from distdiag.jobs.types import NodePicture
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.pyspy_all.types import PySpyAll
    from distdiag.facts.process.procs import Standstill
    from distdiag.report import Report

SITE = "/opt/venv/lib/python3.11/site-packages/"
C10D = SITE + "torch/distributed/distributed_c10d.py"
MAIN = Frame("<module>", "/home/me/train.py", 90)
REQUEST = Request(program="distdiag", cluster=Cluster())


def frames(*inner: tuple[str, str, int]) -> tuple[Frame, ...]:
    """Write a stack, innermost first, on top of the script's module."""
    return (*(Frame(*one) for one in inner), MAIN)


def waits(operation: str = "all_reduce", user: str = "train_step", line: int = 25) -> tuple[Frame, ...]:
    return frames(
        (operation, C10D, 3252),
        ("wrapper", SITE + "torch/distributed/c10d_logger.py", 83),
        (user, "/home/me/train.py", line),
    )


def loads() -> tuple[Frame, ...]:
    return frames(("load_batch", "/home/me/train.py", 26))


def look(
    stack: Sequence[Frame],
    *,
    state: str = "S",
    status: str = "ok",
    reason: str = "",
    main_cpu_s: float = 0.0,
    at_s: float = 0.0,
    counters: Mapping[str, int] | None = None,
    still: Standstill | None = None,
    gil_holder: int | None = None,
    peer: int | None = None,
    groups: int = 0,
) -> Sample:
    counted = tuple(Counter(1, "train", name, value) for name, value in (counters or {}).items())
    thread = Thread(1, "MainThread", False, False, state, tuple(stack), counted, peer=peer)
    return Sample(
        status=status,
        reason=reason,
        state=state,
        tracer=None,
        cpu_s=main_cpu_s,
        main_cpu_s=main_cpu_s,
        threads=(thread,) if stack else (),
        standstill=(still,) if still is not None else (),
        native=False,
        gil_holder=gil_holder,
        at_s=at_s,
        groups=groups,
    )


def twice(
    stack: Sequence[Frame],
    *,
    cpu: float = 0.0,
    later: Sequence[Frame] | None = None,
    apart_s: float = 6.0,
    **more: object,
) -> tuple[Sample, ...]:
    """Sample twice, for longer than a step takes; `cpu` is the share of a core used in between."""
    first = look(stack, **more)  # type: ignore[arg-type]
    last = look(stack if later is None else later, main_cpu_s=cpu * apart_s, at_s=apart_s, **more)  # type: ignore[arg-type]
    return first, last


def process(pid: int, rank: int | None = None, size: int = 4, *, local: bool = True, **more: object) -> Process:
    place = None
    if rank is not None:
        place = Identity("torchrun", rank, size, rank if local else None, size if local else None)
    one = Process(
        pid=pid,
        parent=1000,
        above=(1000, 1),
        user=7,
        state="S",
        comm="python",
        command="python train.py",
        kind="",
        python=True,
        torch=True,
        gpu=False,
        hidden=False,
        place=place,
        job={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
        started_s=1.0,
    )
    return replace(one, **more)  # type: ignore[arg-type]


def node(
    processes: Sequence[Process],
    looks: Mapping[int, Sequence[Sample]],
    host: str = "n1",
    *,
    user: int = 7,
    scope: int | None = None,
) -> NodePicture:
    facts = Processes(host, user, scope, may_trace=False, processes=tuple(processes), asked_missing=())
    watched = tuple(Watched(pid, tuple(seen), ()) for pid, seen in looks.items())
    return NodePicture(host=host, processes=facts, watched=watched, ended=(SourceEnd("stacks", 1.0),))


def job(*stacks: Sequence[Sample]) -> NodePicture:
    """Make one node with a rank for each entry."""
    size = len(stacks)
    return node(
        [process(100 + rank, rank, size) for rank in range(size)],
        {100 + rank: seen for rank, seen in enumerate(stacks)},
    )


def judge(*nodes: NodePicture, **request: object) -> Report[PySpyAll]:
    return diagnose(replace(REQUEST, **request), Gathered(facts=list(nodes)))  # type: ignore[arg-type]


def ids(report: Report[PySpyAll]) -> list[str]:
    return [one.id.partition(".")[2] for one in report.findings]


def outlier_ranks(report: Report[PySpyAll]) -> list[list[int]]:
    return [list(one.ranks) for one in report.data.outliers]
