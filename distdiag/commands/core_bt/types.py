"""The request of core-bt, and its result."""

from __future__ import annotations

import shlex
from dataclasses import field
from enum import StrEnum

from distdiag.cluster.targets import Cluster
from distdiag.facts.core.stacks import ThreadStack  # noqa: TC001 - msgspec reads it
from distdiag.record import record

COMMAND = "core-bt"


class Threads(StrEnum):
    """Values of --threads."""

    CRASHED = "crashed"
    ALL = "all"


@record(kw_only=True)
class Request:
    """The options of one run."""

    program: str = "distdiag"
    cluster: Cluster = field(default_factory=Cluster)
    paths: tuple[str, ...] = ()
    exe: str = ""
    all_threads: bool = False
    setup: bool = False
    timeout_s: float = 60.0

    def again(self, *words: str) -> str:
        """Format the command with other arguments."""
        where = [f"{name} {shlex.quote(value)}" for name, value in self.cluster.typed()]
        return " ".join([self.program, COMMAND, *where, *words])


@record(kw_only=True)
class Core:
    """One core. None: not in the core.

    `time`: modification time, seconds since 1970. `message`: why it aborted: the last message of the C library, or the
    uncaught exception. `mapped`: the file mapped at the address. `role`: cause, or consequence of a failure elsewhere.
    `threads`: the other threads. `changed`: files changed since the crash. `tools`: the tools that read the stacks, or
    why none could.
    """

    path: str
    host: str
    exe: str
    cmdline: str
    pid: int
    rank: int | None
    time: float | None = None
    signal: int = 0
    signal_name: str = ""
    signal_code: int | None = None
    address: int | None = None
    message: str = ""
    mapped: str = ""
    meaning: str
    signature: str | None = None
    role: str | None = None
    crash_thread: ThreadStack | None
    threads: tuple[ThreadStack, ...]
    truncated: bool = False
    size_bytes: int = 0
    whole_bytes: int = 0
    changed: tuple[str, ...] = ()
    tools: tuple[str, ...]


@record(kw_only=True)
class Unread:
    """A file that is not a core or is unreadable, and why."""

    path: str
    host: str
    why: str


@record(kw_only=True)
class CoreBt:
    """Everything found, the earliest crash first; `searched`: the directories, if no core was named."""

    cores: tuple[Core, ...]
    unread: tuple[Unread, ...]
    searched: tuple[str, ...]
