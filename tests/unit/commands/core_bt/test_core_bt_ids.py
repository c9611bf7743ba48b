"""core-bt: facts in, finding ids out."""

from __future__ import annotations

from dataclasses import replace

from loops import each

from distdiag.commands.core_bt.collect import CoreFacts, NodeCores
from distdiag.commands.core_bt.diagnose import diagnose
from distdiag.commands.core_bt.types import Request
from distdiag.facts.core.core_file import CoreNotes, CoreThread
from distdiag.saved_facts import Gathered

NOTES = CoreNotes(
    machine="x86_64",
    pid=7,
    uid=0,
    program="python",
    arguments="python train.py",
    signal=11,
    code=1,
    address=0,
    sender_pid=None,
    threads=(CoreThread(7, 11, None),),
    files=(),
    execfn="/usr/bin/python3",
    size_bytes=1 << 20,
    whole_bytes=1 << 20,
    truncated=False,
)
CORE = CoreFacts("/cores/core.7", "", 1.0, NOTES, exe="/usr/bin/python3")


@each(
    "id_, cores",
    [
        ("core-bt.crash", (CORE,)),
        ("core-bt.truncated", (replace(CORE, notes=replace(NOTES, size_bytes=4096, truncated=True)),)),
        ("core-bt.binary-changed", (replace(CORE, changed=("/usr/lib/libx.so",)),)),
        ("core-bt.unreadable", (CoreFacts("/cores/core.8", "not a core: no ELF header"),)),
        ("core-bt.none", ()),
        (
            "core-bt.consequence",
            (replace(CORE, notes=replace(NOTES, signal=6), message="Watchdog caught collective operation timeout"),),
        ),
    ],
)
def test_a_core_gives_its_finding(id_: str, cores: tuple[CoreFacts, ...]) -> None:
    report = diagnose(Request(), Gathered(facts=[NodeCores("node1", cores, searched=("/cores",))]))
    assert id_ in {str(finding.id) for finding in report.findings}


def test_a_node_without_an_answer_has_its_id() -> None:
    report = diagnose(Request(), Gathered(facts=[NodeCores("node1", (CORE,))], missing={"node2": "timed out"}))
    assert "core-bt.no-answer" in {str(finding.id) for finding in report.findings}
