"""hang, and the pods of a job: facts in, finding ids and levels out."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

from hang_facts import LONG, judge, node, waiting
from loops import each
from pyspy_facts import frames, loads, look, process, twice
from pyspy_facts import node as node_of

from distdiag.cluster.pod_findings import with_pods
from distdiag.facts.recorder.collect import NodeDumps
from distdiag.facts.recorder.read_dump import COLUMNS, Dump, pack

if TYPE_CHECKING:
    from distdiag.jobs.types import NodePicture

TORCHRUN = process(50, parent=1, above=(1,), comm="pt_elastic", kind="launcher", torch=False, started_s=10.0, job={})
SAVES = frames(("save", "/home/me/train.py", 40))


def looping(age_s: float) -> NodePicture:
    """Make a rank that torchrun restarted three times within 90 s."""
    names = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "3"}
    rank = process(60, 0, 1, parent=50, above=(50, 1), started_s=100.0, job=names)
    picture = node_of([TORCHRUN, rank], {60: twice(loads(), still=LONG)})
    return replace(picture, processes=replace(picture.processes, uptime_s=100.0 + age_s))


def recorded(picture: NodePicture) -> NodePicture:
    """Add flight recorder dumps in which no call is open."""
    none = pack([array("q")] * len(COLUMNS))
    dumps = [
        Dump("pickle", ("nccl",), "2.10", rank, 2, (), (), 0, none, 0, path=f"/fr/rank_{rank}", modified_s=1.0)
        for rank in range(2)
    ]
    return replace(picture, dumps=(NodeDumps("n1", dumps=tuple(dumps)),))


@each(
    "id_, level, facts",
    [
        ("hang.elastic-restart", "fail", looping(20.0)),
        ("hang.incomplete", "unknown", node(waiting(), waiting(), missing="timed out")),
        ("hang.left-stopped", "warn", node(waiting(), (replace(look(loads()), left_stopped=True),))),
        ("hang.no-rank", "unknown", node_of([TORCHRUN], {})),
        ("hang.outside-the-job", "unknown", recorded(node(twice(SAVES, still=LONG), twice(SAVES, still=LONG)))),
    ],
)
def test_a_picture_of_a_job_gives_its_finding(id_: str, level: str, facts: NodePicture) -> None:
    found = {(str(each.id), str(each.level)) for each in judge(facts).findings}
    assert (id_, level) in found


def test_pods_whose_states_cannot_be_read_are_a_warning() -> None:
    report = with_pods(judge(node(waiting(), waiting())), (), "pods is forbidden")
    assert [(str(each.id), str(each.level)) for each in report.findings][-1] == ("kube.states-not-read", "warn")
