"""Cores of one node, or one live process, as facts: what the notes say at once, then the stacks."""

from __future__ import annotations

import mmap
import os
import signal
from dataclasses import dataclass, replace

from distdiag.facts import machine, procs, rank_identity
from distdiag.facts.core import by_gdb, by_pystack, merge, notes, packed, places, setup, variables
from distdiag.facts.core.image import NotACore, OtherMachine
from distdiag.facts.core.last_words import read as last_words_of
from distdiag.facts.core.merge import Merged  # noqa: TC001 - decoding reads it
from distdiag.facts.core.notes import CoreNotes  # noqa: TC001 - decoding reads it
from distdiag.facts.core.setup import SetupFacts  # noqa: TC001 - decoding reads it

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from distdiag.facts.core.frames import Stacks

_MOST = 32
_HEAD_BYTES = 32 * 2**20
_UNPACKED_BYTES = 64 * 2**30
_MOST_THREADS = 512


@dataclass(frozen=True)
class CoreFacts:
    """One core file. `error`: why it could not be read; else there are notes.

    `message` and `exception`: see `last_words.read`. `inside`: the address that could not be accessed lay inside of the
    file that was mapped there; None if that file is gone, or was written since.
    """

    path: str
    error: str
    modified_s: float | None = None
    notes: CoreNotes | None = None
    rank: int | None = None
    exe: str = ""
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    message: str = ""
    exception: str = ""
    inside: bool | None = None
    threads: tuple[Merged, ...] = ()
    tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class LiveFacts:
    """One live process and its threads; the states are letters of proc(5), before and after the look."""

    pid: int
    error: str
    exe: str
    cmdline: str
    rank: int | None
    state_before: str
    state_after: str
    threads: tuple[Merged, ...]
    tools: tuple[str, ...]


@dataclass(frozen=True)
class NodeCores:
    """All that was asked of a node. `left_out`: cores that were found and not looked at."""

    host: str
    cores: tuple[CoreFacts, ...] = ()
    left_out: int = 0
    searched: tuple[str, ...] = ()
    missed: tuple[tuple[str, str], ...] = ()
    live: LiveFacts | None = None
    setup: SetupFacts | None = None


def facts(ask: dict[str, Any]) -> NodeCores:
    """Say that this node is here; cores take longer than facts may."""
    return NodeCores(machine.host_name())


def more(ask: dict[str, Any], tell: Callable[[object], None]) -> None:
    """Look at cores, or at what is asked instead.

    {"paths": files and folders, empty: the newest of where this system puts cores; "exe", "gdb": True, False, None:
    where it is needed; "all": all threads by gdb, too; "timeout_s"; "pid": a live process; "setup": whether this
    machine and the ranks on it can leave a core}
    """
    host = machine.host_name()
    if ask["setup"]:
        tell(NodeCores(host, setup=setup.look(_ranks())))
    elif ask["pid"] is not None:
        tell(NodeCores(host, live=_live(ask)))
    else:
        tell(_cores(host, ask))


def _ranks() -> list[int]:
    """List the processes here that are ranks of a job."""
    return [pid for pid in procs.table() if pid != os.getpid() and _rank(procs.variables(pid) or {}) is not None]


def _cores(host: str, ask: dict[str, Any]) -> NodeCores:
    searched: list[str] = []
    missed: list[tuple[str, str]] = []
    paths: dict[str, float | None] = {}
    for name in ask["paths"] or [None]:
        if name is not None and not os.path.isdir(name):
            paths[name] = None
            continue
        found = places.find(name)
        searched += found.searched
        missed += [(one.path, one.why) for one in found.missed]
        paths.update((one.path, one.modified_s) for one in sorted(found.cores, key=lambda one: -one.modified_s))
    chosen = list(paths)[: _MOST if ask["paths"] else 1]
    cores = tuple(_core(path, ask) for path in chosen)
    return NodeCores(host, cores, len(paths) - len(chosen), tuple(searched), tuple(missed))


def _core(path: str, ask: dict[str, Any]) -> CoreFacts:
    try:
        if packed.kind(path) is packed.Kind.PLAIN:
            return _plain(path, ask)
        return _packed(path, ask)
    except (NotACore, packed.CannotUnpack) as error:
        return CoreFacts(path, str(error))
    except OSError as error:
        return CoreFacts(path, error.strerror or str(error))
    except ValueError as error:
        return CoreFacts(path, str(error))


def _plain(path: str, ask: dict[str, Any]) -> CoreFacts:
    told = notes.read(path)
    with by_pystack.OfCore(path, ask["exe"] or _executable(told), told.files) as reading:
        return _with_stacks(_facts(path, path, told, ask), path, ask, reading)


def _facts(path: str, core: Any, told: CoreNotes, ask: dict[str, Any]) -> CoreFacts:  # noqa: ANN401 - a path, or the first bytes
    modified_s = os.stat(path).st_mtime
    message, exception = _last_words(core, told)
    return CoreFacts(
        path=path,
        error="",
        modified_s=modified_s,
        message=message,
        exception=exception,
        inside=_is_inside(told, modified_s),
        notes=told,
        rank=_rank(variables.said_in(core)),
        exe=ask["exe"] or _executable(told),
        changed=notes.changed_files(core, told),
        missing=notes.missing_files(core, told),
    )


def _last_words(core: Any, told: CoreNotes) -> tuple[str, str]:  # noqa: ANN401 - a path, or the first bytes
    return last_words_of(core, told) if told.signal == signal.SIGABRT else ("", "")


def _is_inside(told: CoreNotes, core_s: float) -> bool | None:
    place = notes.Mapped(told.files).at(told.address) if told.address is not None else None
    if place is None or told.address is None:
        return None
    try:
        state = os.stat(place.path)
    except (OSError, ValueError):
        return None
    page = (told.address - place.start + place.offset) // mmap.PAGESIZE * mmap.PAGESIZE
    return page < state.st_size if state.st_mtime <= core_s else None


def _packed(path: str, ask: dict[str, Any]) -> CoreFacts:
    """Read a packed core; its notes before all of it is unpacked, if they come first, as in those of the kernel."""
    facts = None
    try:
        head = packed.head(path, _HEAD_BYTES)
        facts = _facts(path, head, notes.read(head), ask)
    except OtherMachine:
        raise
    except NotACore:  # gdb's gcore has its notes at the end
        pass
    import tempfile

    with tempfile.TemporaryDirectory(prefix="distdiag-core-") as folder:
        try:
            plain = packed.unpack(path, folder, most_bytes=_UNPACKED_BYTES, timeout_s=ask["timeout_s"])
        except (packed.CannotUnpack, OSError) as error:
            if facts is None:
                raise
            size = error.unpacked_bytes if isinstance(error, packed.CutOff) else None
            return replace(_of_size(facts, size), tools=(f"stacks: {error}",))
        # Its first bytes have not the memory that the words stand in.
        facts = facts or _facts(path, plain, notes.read(plain), ask)
        assert facts.notes is not None
        message, exception = _last_words(plain, facts.notes)
        facts = _of_size(replace(facts, message=message, exception=exception), os.stat(plain).st_size)
        assert facts.notes is not None
        with by_pystack.OfCore(plain, facts.exe, facts.notes.files) as reading:
            return _with_stacks(facts, plain, ask, reading)


def _of_size(facts: CoreFacts, size: int | None) -> CoreFacts:
    """Say how long a packed core is, which its first bytes did not tell; None: as long as its headers promise."""
    assert facts.notes is not None
    whole = facts.notes.whole_bytes
    size = whole if size is None else size
    return replace(facts, notes=replace(facts.notes, size_bytes=size, truncated=size < whole))


def _rank(variables: dict[str, str]) -> int | None:
    found = rank_identity.identify(variables)
    return found.rank if found is not None else None


def _executable(told: CoreNotes) -> str:
    """Find the program: by the path that the kernel started, else the first file that is mapped."""
    for path in (told.execfn, told.files[0].path if told.files else ""):
        if path.startswith("/") and os.path.exists(path):
            return os.path.realpath(path)
    return told.files[0].path if told.files else told.execfn


def _with_stacks(facts: CoreFacts, plain: str, ask: dict[str, Any], reading: by_pystack.OfCore) -> CoreFacts:
    assert facts.notes is not None
    crashed = facts.notes.threads[0].tid
    try:
        os.stat(facts.exe)
    except (OSError, ValueError) as error:
        is_hidden = isinstance(error, PermissionError)
        why = "may not be read by this user" if is_hidden else "is not on this machine"
        facts = replace(facts, tools=(f"stacks: the program {facts.exe or 'that crashed'} {why}",))
        return _without_tools(facts, ask, reading)
    pystack = reading.stacks(timeout_s=ask["timeout_s"], unlike={*facts.changed, *facts.missing})
    gdb = None
    if ask["gdb"] or (ask["gdb"] is None and merge.needs_gdb(pystack, crashed)):
        only_first = bool(pystack.threads) and not ask["all"]
        gdb = by_gdb.of_core(plain, facts.exe, timeout_s=ask["timeout_s"], only_first=only_first)
    merged = merge.merge(pystack, gdb, crashed)
    facts = replace(facts, threads=_short(merged), tools=_said(pystack, gdb))
    # One frame is what gdb makes of the registers alone.
    return facts if len(merged[0].thread.frames) > 1 else _without_tools(facts, ask, reading)


def _without_tools(facts: CoreFacts, ask: dict[str, Any], reading: by_pystack.OfCore) -> CoreFacts:
    """Fill in the threads that can be followed further in C than pystack and gdb did."""
    assert facts.notes is not None
    alone = reading.c_frames(timeout_s=ask["timeout_s"], unlike={*facts.changed, *facts.missing})
    found, is_more = merge.longer(facts.threads, _short(merge.merge(alone, None, facts.notes.threads[0].tid)))
    return replace(facts, threads=found, tools=(*facts.tools, *_said(alone))) if is_more else facts


def _live(ask: dict[str, Any]) -> LiveFacts:
    pid = ask["pid"]
    found = procs.read(pid)
    if found is None:
        return LiveFacts(pid, "there is no such process", "", "", None, "", "", (), ())
    before = machine.process_state(pid).letter
    pystack = by_pystack.of_process(pid, timeout_s=ask["timeout_s"])
    wanted = ask["gdb"] or (ask["gdb"] is None and not pystack.threads)
    gdb = by_gdb.of_process(pid, timeout_s=ask["timeout_s"]) if wanted else None
    threads = _short(merge.merge(pystack, gdb, pid))
    words = " ".join(procs.command_words(pid))
    rank = _rank(procs.variables(pid) or {})
    error = "" if any(one.thread.frames for one in threads) else "; ".join(_said(pystack, gdb))
    after = machine.process_state(pid).letter
    return LiveFacts(pid, error, procs.program(pid), words, rank, before, after, threads, _said(pystack, gdb))


def _said(*stacks: Stacks | None) -> tuple[str, ...]:
    """Say who read the stacks, and what they complained of."""
    took = (f" ({one.seconds:.1f} s)" if one and one.seconds >= 0.05 else "" for one in stacks)
    return tuple(
        f"{one.tool}: {one.error or f'{len(one.threads)} threads'}{time}" for one, time in zip(stacks, took) if one
    )


def _short(threads: tuple[Merged, ...]) -> tuple[Merged, ...]:
    """Leave out what the interpreter does between Python frames, and threads beyond what anybody reads."""
    return tuple(
        replace(one, thread=replace(one.thread, frames=merge.shorten(merge.essential(one.thread.frames))))
        for one in threads[:_MOST_THREADS]
    )
