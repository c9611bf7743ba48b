"""Every finding id is declared once, can occur, and occurs only with its levels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from logs_cases import RECORDED, cases
from loops import each

from distdiag import errors
from distdiag.cluster.host_results import HostState
from distdiag.cluster.targets import Cluster
from distdiag.commands.doctor import node_differences
from distdiag.commands.gpu_test.isolate.types import Kind as Isolated
from distdiag.diagnosis import connectivity
from distdiag.diagnosis.finding_ids import declared
from distdiag.diagnosis.flight_recorder.causes import Kind as Recorded
from distdiag.diagnosis.job_logs.diagnose import diagnose
from distdiag.diagnosis.job_logs.types import Request
from distdiag.diagnosis.stuck.types import StuckKind
from distdiag.diagnosis.verdicts import read_table
from distdiag.facts.logs.collect import Reader
from distdiag.ids import Id, Shared
from distdiag.knowledge.known_lines import for_nodes
from distdiag.report import Level
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.report import Finding

ROOT = Path(__file__).parents[2]
ERRORS = (errors.DistdiagError, errors.UsageError, errors.NodeFailed, errors.Interrupted)
_ENDS = ("filtered", "refused", "rejected", "silent", "broken", "cut-off", "no-route", "no-port")
FAMILIES: dict[str, list[str]] = {
    "hang": [f"hang.{kind}" for kind in StuckKind if kind is not StuckKind.KNOWN_BUG],  # only ever a hint
    "hosts": [f"hosts.{state}" for state in HostState if state is not HostState.OK],
    "flight-recorder": [f"flight-recorder.{kind}" for kind in Recorded],
    "isolate": [f"gpu-test.{kind}" for kind in Isolated if kind is not Isolated.HEALTHY],
    "doctor": [f"doctor.differs.{kind}" for kind in node_differences._KINDS],
    "errors": [kind.id for kind in ERRORS] + ["scarce", "distdiag.bug"],
    "paths": [f"ports.{purpose}-{end}" for purpose in connectivity._PURPOSES.values() for end in _ENDS],
}
"""Ids that code makes of a kind and a prefix."""


@each("name", FAMILIES)
def test_each_kind_of_a_family_has_a_declared_id(name: str) -> None:
    assert sorted(set(FAMILIES[name]) - declared().keys()) == []


def test_each_declared_id_is_made_by_code() -> None:
    used = set[str]()
    for path in (ROOT / "distdiag").rglob("*.py"):
        if path.name != "ids.py":
            used.update(re.findall(r"\b(?:Id|Shared)\.([A-Z][A-Z_0-9]+)\b", path.read_text()))
    made = {id_ for family in FAMILIES.values() for id_ in family}
    made |= {id_.partition(".")[2] for id_ in made}
    assert [one.name for one in (*Id, *Shared) if one.name not in used and one not in made] == []


def test_an_id_is_declared_once() -> None:
    code = [*Id, *(shared.of(command) for shared in Shared for command in shared.commands.split())]
    assert len(code) == len(set(code))
    of_rows = {f"doctor.{name}" for name in read_table("doctor_symptoms")["checks"]}
    of_rows |= {f"cuda-env.{name}" for name in read_table("cuda_problems")["checks"]}
    assert of_rows & set(code) == set()
    assert {table: sorted(_checks(table) ^ _rows(table)) for table in ("doctor_symptoms", "cuda_problems")} == {
        "doctor_symptoms": [],
        "cuda_problems": [],
    }


def _checks(table: str) -> set[str]:
    return set(read_table(table)["checks"])


def _rows(table: str) -> set[str]:
    kind = "symptom" if table == "doctor_symptoms" else "problem"
    return {str(row.get("id", row["name"])) for row in read_table(table)[kind]}


def test_each_declaration_has_levels_and_a_meaning() -> None:
    levels = {str(level) for level in Level}
    assert [one.id for one in declared().values() if not one.levels or not set(one.levels) <= levels] == []
    assert [one.id for one in declared().values() if not re.search("[a-z]{2}", one.means)] == []


def test_ids_of_recorded_logs_are_declared(tmp_path: Path) -> None:
    paths = sorted(path for path in RECORDED.rglob("*") if path.is_file())
    for number, case in enumerate(case for case in cases() if not (RECORDED / f"{case.name}.log.gz").exists()):
        paths.append(tmp_path / f"{number}.log")
        paths[-1].write_bytes(case.text)
    found = {(str(one.id), str(one.level)) for path in paths for one in _findings(path)}
    known = declared()
    assert sorted(id_ for id_, _ in found if id_ not in known) == []
    assert sorted((id_, level) for id_, level in found if level not in known[id_].levels) == []


def _findings(path: Path) -> Iterable[Finding]:
    reader = Reader(for_nodes())
    reader.read(str(path))
    return diagnose(Request(program="distdiag", cluster=Cluster()), Gathered(facts=[reader.found()])).findings


def test_each_id_is_named_in_a_test() -> None:
    """Only by its text, in tests and in their tables of cases."""
    tests = {*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests").glob("*.py")} - {Path(__file__)}
    text = "\n".join(path.read_text() for path in tests)
    # Recorded logs of builds name their ids; test_cuda_env_ids.py checks them.
    heads = (path.read_text().split("\n")[1] for path in (ROOT / "tests/recorded/cuda_logs").glob("*.txt"))
    text += "\n".join(f'"log.{name}"' for head in heads for name in head.split())
    names = [id_ for id_ in declared() if id_ not in text and f'"{id_.partition(".")[2]}"' not in text]
    assert names == ["distdiag.bug"]  # only a bug makes it
