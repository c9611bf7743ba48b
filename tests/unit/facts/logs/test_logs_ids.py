"""logs: texts in, finding ids and levels out, for ids that the tables of cases leave open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from logs_cases import cases, edges

from distdiag.cluster.targets import Cluster
from distdiag.diagnosis.job_logs.diagnose import diagnose
from distdiag.diagnosis.job_logs.types import Request
from distdiag.facts.logs.collect import Reader
from distdiag.knowledge.known_lines import for_nodes
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from pathlib import Path

CASES = {case.name: case.text for case in cases()}
STATIC = "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /{}/torchelastic/role_info/0\n"
DYNAMIC = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
SOCKETS = "".join(
    edges(f"node{node}", node, "NET/Socket : Using [0]eth0:10.0.0.1<0>", "Using network Socket") for node in (1, 2)
)


def found(folder: Path, *texts: bytes) -> set[tuple[str, str]]:
    reader = Reader(for_nodes())
    for number, text in enumerate(texts):
        path = folder / f"{number}.log"
        path.write_bytes(text)
        reader.read(str(path))
    report = diagnose(Request(program="distdiag", cluster=Cluster()), Gathered(facts=[reader.found()]))
    return {(str(finding.id), str(finding.level)) for finding in report.findings}


def test_logs_that_are_not_read_have_their_ids(tmp_path: Path) -> None:
    reader = Reader(for_nodes())
    reader.read(str(tmp_path / "nothing.log"))
    gathered = Gathered(facts=[reader.found()], missing={"node2": "timed out"})
    report = diagnose(Request(program="distdiag", cluster=Cluster()), gathered)
    assert [(str(each.id), str(each.level)) for each in report.findings] == [
        ("logs.unreadable", "unknown"),
        ("logs.incomplete", "unknown"),
    ]


@pytest.mark.parametrize(
    ("id_", "level", "name"),
    [
        ("logs.nccl-local-interface", "warn", "info-lo"),
        ("logs.nccl-plugin", "warn", "info-plugin"),
        ("logs.order-unknown", "unknown", "torchrun-two"),
        ("logs.restarted", "info", "torchrun-restart"),
        ("logs.traceback-cut", "unknown", "tail-cut-off"),
        ("logs.watchdog-never", "unknown", "wd-never"),
        ("logs.watchdog-outside", "unknown", "wd-outside"),
        ("logs.watchdog-same", "unknown", "wd-same"),
        ("logs.watchdog-unclear", "unknown", "groups-of-one-number"),
        ("logs.watchdog-unclear", "info", "group-of-other-ranks"),
    ],
)
def test_a_case_gives_its_finding(id_: str, level: str, name: str, tmp_path: Path) -> None:
    assert (id_, level) in found(tmp_path, CASES[name])


@pytest.mark.parametrize(
    ("id_", "level", "texts"),
    [
        ("logs.long-lines", "info", ("x" * (3 << 20),)),
        ("logs.nccl-sockets", "info", (SOCKETS,)),
        ("logs.rendezvous-differs", "fail", (STATIC.format("first"), STATIC.format("second"))),
        ("logs.rendezvous-differs", "fail", (STATIC.format("none"), DYNAMIC)),
    ],
    ids=["a line of 3 MiB", "nccl-sockets", "two run ids", "two backends"],
)
def test_a_text_gives_its_finding(id_: str, level: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    assert (id_, level) in found(tmp_path, *(text.encode() for text in texts))
    assert (id_, level) not in found(tmp_path, texts[0].replace("Socket", "IB").encode()[:200_000])
