"""pyspy-all as one offline HTML page: shared frames and stacks are embedded once."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.errors import UsageError
from distdiag.files import write_whole
from distdiag.output import document

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from distdiag.commands.pyspy_all.types import PySpyAll
    from distdiag.report import Report

_FIELDS = ("host", "job", "role", "state", "class", "status", "reason")
_AS_IS = ("pid", "rank", "local_rank", "moving", "cpu_s", "helpers")
# The JSON is inside a script element: these characters could end it, or start a comment that swallows the page.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def check_place(path: str) -> None:
    """Check that a file can be written before any sample is taken. Raises UsageError."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UsageError(f"--html {path}: cannot write this file", hint="choose a writable path")


def write_page(report: Report[PySpyAll], path: str, *, strict: bool) -> None:
    """Write the report as one page for a browser. Raises DistdiagError."""
    write_whole(path, make_page(document(report, strict=strict)).encode())


def make_page(content: Mapping[str, Any]) -> str:
    """Format the document of --json as one HTML page, in ASCII.

    Names and reasons in it are untrusted: embedded as JSON and shown as text. As a second barrier the page's policy
    allows only the template's script and style, by hash, and no requests.
    """
    page = files("distdiag.commands.pyspy_all").joinpath("html_report.html").read_text("ascii")
    for element in ("style", "script"):
        page = page.replace(f"@{element}-hash@", _hash_inside(page, element))
    text = json.dumps(_content(content), separators=(",", ":"), allow_nan=False)
    return page.replace("@data@", text.translate(_ESCAPES), 1)


def _hash_inside(page: str, element: str) -> str:
    inside = re.search(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    assert inside is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()}'"


class _Pool:
    """Numbered values, each held once."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[Hashable]:
        return list(self._numbers)


class _Shared:
    """Values shared by processes; the page looks these up by number."""

    def __init__(self) -> None:
        self.strings, self.frames, self.stacks, self.threads, self.counters = (_Pool() for _ in range(5))
        self.library: set[int] = set()

    def frame(self, frame: Mapping[str, Any]) -> int:
        number = self.frames.number((frame["function"], frame["file"], frame["line"]))
        if frame.get("user") is False:
            self.library.add(number)
        return number

    def values(self) -> dict[str, list[Any]]:
        pools = ("strings", "frames", "stacks", "threads", "counters")
        return {"library": sorted(self.library), **{name: getattr(self, name).values() for name in pools}}

    def stack(self, frames: Iterable[Mapping[str, Any]]) -> int:
        return self.stacks.number(tuple(map(self.frame, frames)))

    def all_threads(self, threads: Iterable[Mapping[str, Any]]) -> int:
        return self.threads.number(
            tuple((thread["name"], thread["class"], self.stack(thread["frames"])) for thread in threads)
        )

    def process(self, process: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{field: self.strings.number(process[field]) for field in _FIELDS},
            **{field: process[field] for field in _AS_IS},
            "counters": self.counters.number(tuple(process["counters"].items())),
            "threads": self.all_threads(process["threads"]),
            "os_thread_ids": [thread["os_thread_id"] for thread in process["threads"]],
        }


def _content(document: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the report to the page's content; processes are referred to by index in `rows`."""
    data, shared = document["data"], _Shared()
    processes = sorted(data["processes"], key=_order)
    members = _Members(processes)
    rows = [shared.process(process) for process in processes]
    groups = [_group(group, members, shared) for group in data["groups"]]
    return {
        **{key: document[key] for key in ("version", "verdict", "exit_code", "summary")},
        **{key: data[key] for key in ("samples", "interval_s")},
        "findings": [{**finding, "where": _where(finding["where"])} for finding in document["findings"]],
        "jobs": [{**job, "hosts": fold(job["hosts"])} for job in data["jobs"]],
        "outliers": [_outlier(outlier, members) for outlier in data["outliers"]],
        "groups": groups,
        "columns": list(rows[0]) if rows else [],
        "rows": [list(row.values()) for row in rows],
        **shared.values(),
    }


def _order(process: Mapping[str, Any]) -> tuple[str, bool, int, bool, str, int]:
    rank = process["rank"]
    return process["job"], rank is None, rank or 0, process["role"] != "rank", process["host"], process["pid"] or 0


class _Members:
    """Finds the processes of a group or an outlier, whose hosts and pids are sets rather than pairs."""

    def __init__(self, processes: Iterable[Mapping[str, Any]]) -> None:
        self._by_rank: dict[int | None, list[tuple[int, Mapping[str, Any]]]] = {}
        for place, process in enumerate(processes):
            if process["role"] == "rank":
                self._by_rank.setdefault(process["rank"], []).append((place, process))

    def of(self, some: Mapping[str, Any], job: str | None = None) -> str:
        """Fold the indexes of the processes: "0-1,3-511"."""
        # A missing rank may have neither host nor pid.
        hosts, pids = {*some["hosts"], ""}, set(some["pids"])
        return fold_ranks(
            place
            for rank in {*some["ranks"], None}
            for place, process in self._by_rank.get(rank, ())
            if process["host"] in hosts
            and (process["pid"] in pids or (process["pid"] is None and rank is not None))
            and job in (None, process["job"])
        )


def _group(group: Mapping[str, Any], members: _Members, shared: _Shared) -> dict[str, Any]:
    return {
        **{key: group[key] for key in ("job", "class", "moving")},
        "stack": shared.stack(group["frames"]),
        "members": members.of(group, group["job"]),
    }


def _outlier(outlier: Mapping[str, Any], members: _Members) -> dict[str, Any]:
    shown = {key: outlier[key] for key in ("kind", "class", "frame", "reason")}
    return {**shown, **_where(outlier), "members": members.of(outlier)}


def _where(where: Mapping[str, Any]) -> dict[str, str]:
    return {
        "hosts": fold(where["hosts"]),
        "ranks": fold_ranks(where["ranks"]),
        "pids": fold_ranks(where["pids"]),
    }
