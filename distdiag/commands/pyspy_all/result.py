"""The answer of pyspy-all, as --json prints it. Frames are innermost first.

Structs and not dataclasses: a key is called "class", and there may be tens of thousands of rows.
"""

from __future__ import annotations

import msgspec  # noqa: TID253 - imported lazily, with the diagnosis

_RENAMED = {"class_": "class"}


class FrameRow(msgspec.Struct, frozen=True):
    """One frame; `line` is 0 where it is not known, `user` that it is the user's own code."""

    function: str
    file: str
    line: int
    user: bool


class ThreadRow(msgspec.Struct, frozen=True, rename=_RENAMED):
    """One thread."""

    name: str
    os_thread_id: int
    class_: str
    frames: tuple[FrameRow, ...]


class ProcessRow(msgspec.Struct, frozen=True, rename=_RENAMED):
    """One process. `cpu_s`: processor seconds that it used from the first look to the last; None after one look."""

    host: str
    pid: int | None
    rank: int | None
    local_rank: int | None
    job: str
    role: str
    state: str
    status: str
    reason: str
    class_: str
    moving: bool | None
    cpu_s: float | None
    counters: dict[str, int]
    helpers: tuple[int, ...]
    threads: tuple[ThreadRow, ...]


class Group(msgspec.Struct, frozen=True, rename=_RENAMED):
    """Ranks that stand at the same place; `counters` are the loop counters that are the same for all of them."""

    job: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    class_: str
    moving: bool | None
    count: int
    odd: bool
    counters: dict[str, int]
    frames: tuple[FrameRow, ...]


class OddFrame(msgspec.Struct, frozen=True):
    """The frame that tells where somebody stands."""

    function: str
    file: str
    line: int


class Odd(msgspec.Struct, frozen=True, rename=_RENAMED):
    """Who is not where the others are, and why we say so."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    class_: str
    frame: OddFrame | None
    reason: str


class JobRow(msgspec.Struct, frozen=True):
    """One job; `ranks` is the number of those seen."""

    job: str
    launcher: str
    world_size: int | None
    ranks: int
    hosts: tuple[str, ...]


class PySpyAll(msgspec.Struct, frozen=True):
    """The facts of the answer."""

    samples: int
    interval_s: float
    jobs: tuple[JobRow, ...]
    processes: tuple[ProcessRow, ...]
    groups: tuple[Group, ...]
    odd: tuple[Odd, ...]
