"""Content of hang's page: a square per rank, by host and local rank; equal texts are embedded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.pages import Pool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LETTERS = {
    "communication wait": "C",
    "data loading": "D",
    "storage": "S",
    "network": "N",
    "compute": "R",
    "gpu wait": "G",
    "compile": "J",
    "checkpoint": "K",
    "lock": "L",
    "gil": "L",
    "debugger": "B",
    "teardown": "E",
    "import": "I",
    "python": "P",
    "stopped": "T",
    "exited": "X",
    "no process": "X",
    "unreadable": "?",
}
"""Letter of each class of stacks, so that colour is not the only sign."""
_EDGES = 400


def content(data: Mapping[str, Any]) -> dict[str, object]:
    """Reduce a report's data to the page's content."""
    strings, stacks = Pool(), Pool()
    processes = sorted(data["processes"], key=_order)
    return {
        "class_name": data["class_name"],
        "next_experiment": data["next_experiment"],
        "sources": [{**row, "ranks": fold_ranks(row["ranks"])} for row in data["sources"]],
        "jobs": [{**job, "hosts": fold(job["hosts"])} for job in data["jobs"]],
        "letters": _LETTERS,
        "rows": [_row(process, strings, stacks) for process in processes],
        "edges": list(_edges(processes)),
        "strings": strings.values(),
        "stacks": stacks.values(),
    }


def _order(process: Mapping[str, Any]) -> tuple[str, bool, int, str, int]:
    rank = process["rank"]
    return process["job"], rank is None, rank or 0, process["host"], process["pid"] or 0


def _row(process: Mapping[str, Any], strings: Pool, stacks: Pool) -> list[Any]:
    """Return one rank, with texts and stacks as numbers, in the order of the page's script."""
    names = ("host", "job", "doing", "stuck", "waits", "recorder")
    return [
        *(strings.number(process[name]) for name in names),
        *(process[name] for name in ("rank", "local_rank", "pid", "moving", "since_s", "waits_for")),
        strings.number(", ".join(f"{name} {value}" for name, value in process["counters"].items())),
        stacks.number(tuple(process["frames"])),
        stacks.number(tuple(process["recent"])),
    ]


def _edges(processes: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, str]]:
    """Fold the wait graph: equal waits for one rank are one edge; ranks in a collective wait for the stuck ones."""
    stuck = [p for p in processes if p["stuck"]]
    groups: dict[tuple[str, str], list[int]] = {}
    for process in processes:
        if process["rank"] is None:
            continue
        if process["waits_for"] is not None:
            groups.setdefault((f"rank {process['waits_for']}", process["doing"]), []).append(process["rank"])
        elif not process["stuck"] and process["doing"] in ("communication wait", "gpu wait") and stuck:
            held_by = fold_ranks(other["rank"] for other in stuck if other["rank"] is not None)
            to = f"rank{'s' if len(stuck) > 1 else ''} {held_by}"
            groups.setdefault((to, process["doing"]), []).append(process["rank"])
    for (target, doing), ranks in list(groups.items())[:_EDGES]:
        yield {"from": f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)}", "to": target, "doing": doing}
