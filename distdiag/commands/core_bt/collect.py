"""Reads the cores of one node: notes first, then stacks."""

from __future__ import annotations

import mmap
import os
import signal
from dataclasses import replace

from distdiag.facts import machine, packed_files
from distdiag.facts.core import core_file, last_words, pystack, setup, stacks, stored_cores, unwinder
from distdiag.facts.core.call_frames import CannotUnwind
from distdiag.facts.core.core_file import CoreNotes  # noqa: TC001 - decoding reads it
from distdiag.facts.core.setup import SetupFacts  # noqa: TC001 - decoding reads it
from distdiag.facts.core.stacks import ThreadStack  # noqa: TC001 - decoding reads it
from distdiag.facts.process import procs, rank_identity
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.facts.core.stacks import Stacks

_MAX_CORES = 32
_MAX_UNPACKED_BYTES = 64 * 2**30
_MAX_THREADS = 512


@record
class Ask:
    """Core files, or `setup`: whether this machine and its ranks can leave a core.

    `paths`: files and folders, empty: the newest core where this system stores cores. `timeout_s`: of each tool.
    """

    paths: Sequence[str]
    exe: str
    timeout_s: float
    setup: bool


@record
class CoreFacts:
    """One core file. `error`: why it is unreadable; otherwise `notes` is set.

    `message` and `exception`: see `last_words.read`. `inside`: the fault address is within the current size of the file
    mapped there; None if the file is missing or was modified after the crash. `threads`: the crashed one is first.
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
    threads: tuple[ThreadStack, ...] = ()
    tools: tuple[str, ...] = ()


@record
class NodeCores:
    """The facts of one node. `left_out`: number of cores not read; `missed`: unreadable paths, with reasons."""

    host: str
    cores: tuple[CoreFacts, ...] = ()
    left_out: int = 0
    searched: tuple[str, ...] = ()
    missed: tuple[tuple[str, str], ...] = ()
    setup: SetupFacts | None = None


def facts() -> NodeCores:
    """Return the host name at once; reading cores takes longer than the deadline for facts."""
    return NodeCores(machine.host_name())


def more(ask: Ask, tell: Callable[[object], None]) -> None:
    """Read the cores, or the setup."""
    host = machine.host_name()
    if ask.setup:
        ranks = [pid for pid in procs.table() if pid != os.getpid() and _rank(procs.variables(pid) or {}) is not None]
        tell(NodeCores(host, setup=setup.read(ranks)))
    else:
        tell(_cores(host, ask))


def _cores(host: str, ask: Ask) -> NodeCores:
    searched: list[str] = []
    missed: list[tuple[str, str]] = []
    paths: dict[str, None] = {}
    for name in ask.paths or (None,):
        if name is not None and not os.path.isdir(name):
            paths[name] = None
            continue
        found = stored_cores.find(name)
        searched += found.searched
        missed += found.skipped
        paths.update(dict.fromkeys(found.cores))
    chosen = list(paths)[: _MAX_CORES if ask.paths else 1]
    cores = tuple(_core(path, ask) for path in chosen)
    return NodeCores(host, cores, len(paths) - len(chosen), tuple(searched), tuple(missed))


def _core(path: str, ask: Ask) -> CoreFacts:
    try:
        if packed_files.packing_of(path) is not packed_files.Packing.NONE:
            return _packed(path, ask)
        return _with_stacks(_facts(path, path, ask), path, ask)
    except (core_file.NotACore, packed_files.CannotUnpack, ValueError) as error:
        return CoreFacts(path, str(error))
    except OSError as error:
        return CoreFacts(path, error.strerror or str(error))


def _facts(path: str, core: str, ask: Ask) -> CoreFacts:
    """Return everything but the stacks; `core`: the path of the unpacked core."""
    notes, modified_s = core_file.read(core), os.stat(path).st_mtime
    message, exception = last_words.read(core, notes) if notes.signal == signal.SIGABRT else ("", "")
    return CoreFacts(
        path=path,
        error="",
        modified_s=modified_s,
        message=message,
        exception=exception,
        inside=_is_inside(notes, modified_s),
        notes=notes,
        rank=_rank(core_file.rank_variables(core)),
        exe=ask.exe or _executable(notes),
        changed=core_file.changed_files(core, notes),
        missing=core_file.missing_files(core, notes),
    )


def _is_inside(notes: CoreNotes, core_s: float) -> bool | None:
    mapped = core_file.MappedFiles(notes.files).at(notes.address) if notes.address is not None else None
    if mapped is None or notes.address is None:
        return None
    try:
        state = os.stat(mapped.path)
    except (OSError, ValueError):
        return None
    page = (notes.address - mapped.start + mapped.offset) // mmap.PAGESIZE * mmap.PAGESIZE
    return page < state.st_size if state.st_mtime <= core_s else None


def _packed(path: str, ask: Ask) -> CoreFacts:
    """Read a packed core. If only its beginning could be unpacked, that has the notes of a kernel's core."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="distdiag-core-") as folder:
        plain, error = stored_cores.unpack(path, folder, most_bytes=_MAX_UNPACKED_BYTES, timeout_s=ask.timeout_s)
        try:
            facts = _facts(path, plain, ask)
        except core_file.NotACore as reason:  # gdb's gcore writes notes at the end
            raise (error if error and not isinstance(reason, core_file.OtherMachine) else reason) from None
        if error is None or isinstance(error, packed_files.CutOff):
            return _with_stacks(facts, plain, ask)
        assert facts.notes is not None
        notes = replace(facts.notes, truncated=False, size_bytes=facts.notes.whole_bytes)
        return replace(facts, notes=notes, tools=(f"stacks: {error}",))


def _rank(variables: dict[str, str]) -> int | None:
    found = rank_identity.identify(variables)
    return found.rank if found is not None else None


def _executable(notes: CoreNotes) -> str:
    """Return the program: the path passed to execve if it exists, else the first mapped file."""
    for path in (notes.execfn, notes.files[0].path if notes.files else ""):
        if path.startswith("/") and os.path.exists(path):
            return os.path.realpath(path)
    return notes.files[0].path if notes.files else notes.execfn


def _with_stacks(facts: CoreFacts, plain: str, ask: Ask) -> CoreFacts:
    """Add stacks by pystack; by our unwinder if pystack does not find the crashed thread."""
    assert facts.notes is not None
    crashed = facts.notes.threads[0].tid
    own = _c_frames(facts, plain)
    if why := _why_no_program(facts.exe):
        tools = (f"stacks: the program {facts.exe or 'that crashed'} {why}",)
        return _with_own(replace(facts, tools=tools), own)
    found = pystack.of_core(plain, facts.exe, facts.notes.files, own, timeout_s=ask.timeout_s)
    threads = _short(stacks.crashed_first(found, crashed))
    facts = replace(facts, threads=threads, tools=(_tool(found),))
    return facts if len(threads[0].frames) > 1 else _with_own(facts, own)


def _c_frames(facts: CoreFacts, plain: str) -> unwinder.CFrames | None:
    assert facts.notes is not None
    try:
        return unwinder.CFrames(plain, facts.notes.files, {*facts.changed, *facts.missing})
    except CannotUnwind:
        return None


def _why_no_program(path: str) -> str:
    try:
        os.stat(path)
    except PermissionError:
        return "cannot be read by this user (permission denied)"
    except (OSError, ValueError):
        return "is not on this machine"
    return ""


def _with_own(facts: CoreFacts, own: unwinder.CFrames | None) -> CoreFacts:
    """Replace the threads that our unwinder followed further than pystack."""
    assert facts.notes is not None
    if own is None:
        return facts
    alone = own.stacks()
    threads = _short(stacks.crashed_first(alone, facts.notes.threads[0].tid))
    found, is_more = stacks.longer(facts.threads, threads)
    return replace(facts, threads=found, tools=(*facts.tools, _tool(alone))) if is_more else facts


def _tool(answer: Stacks) -> str:
    took = f" ({answer.seconds:.1f} s)" if answer.seconds >= 0.05 else ""
    return f"{answer.tool}: {answer.error or f'{len(answer.threads)} threads'}{took}"


def _short(threads: Sequence[ThreadStack]) -> tuple[ThreadStack, ...]:
    """Drop interpreter frames between Python frames, and threads beyond a readable number."""
    return tuple(
        replace(thread, frames=stacks.shorten(stacks.essential(thread.frames))) for thread in threads[:_MAX_THREADS]
    )
