"""What core-bt finds."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.facts.core.frames import Frame  # noqa: TC001 - msgspec reads it


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread; frames innermost first, Python and C in one stack."""

    tid: int
    name: str
    gil: bool | None
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class Core:
    """One core, or a live process (then `path` is empty). None: the core does not tell."""

    path: str
    host: str
    exe: str
    cmdline: str
    pid: int
    rank: int | None
    time: float | None
    """When it was written, seconds since 1970."""
    signal: int
    signal_name: str
    signal_code: int | None
    address: int | None
    said: str
    """Why it aborted, in its own words: the C library's last message, or the exception that nobody caught."""
    mapped: str
    """The file that was mapped at the address."""
    meaning: str
    signature: str | None
    role: str | None
    """cause, or consequence of another process's trouble."""
    crash_thread: Thread | None
    threads: tuple[Thread, ...]
    """The others."""
    truncated: bool
    size_bytes: int
    whole_bytes: int
    changed: tuple[str, ...]
    """Files that are others now than when it crashed."""
    tools: tuple[str, ...]
    """What read the stacks, or why it could not."""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A file that is no core, or cannot be read, and why."""

    path: str
    host: str
    why: str


@dataclass(frozen=True, kw_only=True)
class CoreBt:
    """All that was found, the earliest crash first."""

    cores: tuple[Core, ...]
    unread: tuple[Unread, ...]
    looked_in: tuple[str, ...]
    """Places, if no core was named."""
