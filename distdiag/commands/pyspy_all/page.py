"""Content of pyspy-all's page: shared frames and stacks are embedded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.fold import by_key
from distdiag.pages import Pool, folded_where

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_FIELDS = ("host", "job", "role", "state", "class", "status", "reason")
_AS_IS = ("pid", "rank", "local_rank", "moving", "cpu_s", "helpers")


class _Shared:
    """Values shared by processes; the page looks these up by number."""

    def __init__(self) -> None:
        self.strings, self.frames, self.stacks, self.threads, self.counters = (Pool() for _ in range(5))
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

    def process(self, process: Mapping[str, Any]) -> dict[str, object]:
        return {
            **{field: self.strings.number(process[field]) for field in _FIELDS},
            **{field: process[field] for field in _AS_IS},
            "counters": self.counters.number(tuple(process["counters"].items())),
            "threads": self.all_threads(process["threads"]),
            "os_thread_ids": [thread["os_thread_id"] for thread in process["threads"]],
        }


def content(data: Mapping[str, Any]) -> dict[str, object]:
    """Reduce a report's data to the page's content; processes are referred to by index in `rows`."""
    shared = _Shared()
    processes = sorted(data["processes"], key=_order)
    members = _Members(processes)
    rows = [shared.process(process) for process in processes]
    groups = [_group(group, members, shared) for group in data["groups"]]
    return {
        **{key: data[key] for key in ("samples", "interval_s")},
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
        ranks = ((place, process) for place, process in enumerate(processes) if process["role"] == "rank")
        self._by_rank = by_key((process["rank"], (place, process)) for place, process in ranks)

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


def _group(group: Mapping[str, Any], members: _Members, shared: _Shared) -> dict[str, object]:
    return {
        **{key: group[key] for key in ("job", "class", "moving")},
        "stack": shared.stack(group["frames"]),
        "members": members.of(group, group["job"]),
    }


def _outlier(outlier: Mapping[str, Any], members: _Members) -> dict[str, object]:
    shown = {key: outlier[key] for key in ("kind", "class", "frame", "reason")}
    return {**shown, **folded_where(outlier), "members": members.of(outlier)}
