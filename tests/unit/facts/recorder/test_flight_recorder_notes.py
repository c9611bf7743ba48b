"""flight-recorder: the findings besides the cause, on facts alone."""

from __future__ import annotations

from distdiag.cluster.targets import Cluster
from distdiag.diagnosis.flight_recorder.causes import Cause, Kind
from distdiag.diagnosis.flight_recorder.findings import finding_of, notes, undecided
from distdiag.diagnosis.flight_recorder.matching import Call, Group, Job, Operation, Outdated
from distdiag.diagnosis.flight_recorder.types import Request
from distdiag.facts.recorder.collect import NodeDumps, Unread
from distdiag.facts.recorder.read_dump import Dump
from distdiag.saved_facts import Gathered

REQUEST = Request(program="distdiag", cluster=Cluster())


def dump(rank: int | None) -> Dump:
    return Dump(
        path=f"/fr/rank_{rank}",
        modified_s=1.0,
        form="pickle",
        backends=("nccl",),
        version="2.10",
        rank=rank,
        candidates="",
        world_size=0,
        host="n1",
        error="",
        dumped_s=1.0,
        truncated=False,
        unreadable=0,
        groups=(),
        p2p_groups=(),
        status=(),
        operations=(),
        sites=(),
        count=0,
        entries="",
    )


def test_each_of_these_files_has_its_id() -> None:
    job = Job({0: dump(0)}, world_size=3, without_rank=[dump(None)], replaced=[dump(0)])
    job.outdated[1] = Outdated("default_pg", 7, 0, 5)
    nodes = [
        NodeDumps("n1", unread=(Unread("/fr/x", "truncated", "ends within an entry"), Unread("/fr/y", "code", "os")))
    ]
    found = list(notes(job, nodes, Gathered(facts=nodes, missing={"n2": "it did not answer"}), set(), REQUEST))
    assert [(one.id, str(one.level)) for one in found] == [
        ("flight-recorder.truncated", "warn"),
        ("flight-recorder.code", "unknown"),
        ("flight-recorder.incomplete", "unknown"),
        ("flight-recorder.outdated", "unknown"),
        ("flight-recorder.missing-dump", "unknown"),
        ("flight-recorder.no-rank", "warn"),
        ("flight-recorder.older", "info"),
    ]
    assert found[4].title == "rank 2 left no dump, and no other rank is behind"
    assert undecided([0]).id == "flight-recorder.undecided"


def test_a_collective_that_all_have_called_is_in_flight() -> None:
    key = ("0", "nccl")
    group = Group(key, members=(0, 1), label="default_pg")
    operation = Operation("all_reduce", "nccl", ((4,),), ((4,),), ("Float",), ("all_reduce", 4, ("Float",)))
    call = Call(0, key, operation, 5, 5, 0, 0, 0, ("train", "train.py", 25))
    job = Job({0: dump(0), 1: dump(1)}, world_size=2, groups={key: group})
    found = finding_of(Cause(Kind.IN_FLIGHT, (), (0, 1), group, 5, (call,)), job, REQUEST)
    assert (found.id, found.level) == ("flight-recorder.in-flight", "unknown")
    assert found.title == (
        "all ranks called all_reduce #5 of default_pg at train (train.py:25); ranks 0-1 have not finished it: "
        "no rank is behind"
    )
    assert found.fix is not None
    assert found.fix.commands == ("distdiag gpu-test",)
