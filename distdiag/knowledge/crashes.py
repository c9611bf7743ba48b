"""The meaning of crashes: signals, known crashes, how to enable core dumps; as data (crashes.toml)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from distdiag.facts.programs import signal_name
from distdiag.knowledge.tables import load
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence

_SI_USER, _SI_QUEUE, _SI_TKILL = 0, -1, -6
_SENT = (_SI_USER, _SI_QUEUE, _SI_TKILL)
"""si_codes of signals sent by a process, see sigaction(2)."""
_NEAR_NULL = 0x10000
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")


@record(kw_only=True)
class _When:
    """The conditions of a row, see crashes.toml."""

    signals: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    address_from: int = 0
    address_below: int = 0
    frames: tuple[str, ...] = ()
    within: int | None = None
    text: str = ""
    repeated: int = 0
    inside: bool | None = None


@record(kw_only=True)
class Crash:
    """One known crash. A consequence was caused by another process or an earlier event."""

    id: str
    role: Literal["cause", "consequence"]
    says: str
    fix: str
    source: str
    when: _When
    commands: tuple[str, ...] = ()


@record(kw_only=True)
class CoreLimit:
    """How to enable core dumps in ranks of one launcher."""

    fix: str
    commands: tuple[str, ...]


@record(kw_only=True)
class _Signal:
    means: str
    code: dict[str, str] = field(default_factory=dict)


def recognise(
    functions: Sequence[str],
    text: str,
    signal: int,
    code: int | None,
    address: int | None,
    *,
    inside: bool | None = None,
) -> Crash | None:
    """Find the first known crash that matches; None if none does, or if another process sent the signal.

    Args:
        functions: names of the crashed thread's frames, native ones too, innermost first.
        text: the process's last words and the name of the file mapped at `address`; empty if unknown.
        code: si_code of sigaction(2); None if unknown.
        address: si_addr; None if unknown, or if this signal has none.
        inside: whether `address` was inside the mapped file; None if unknown.
    """
    if code in (_SI_USER, _SI_QUEUE):
        return None
    name = signal_name(signal)
    fitting = (
        crash
        for crash in known_crashes()
        if _fits(crash.when, name, code, address)
        and (crash.when.inside is None or crash.when.inside == inside)
        and _shows(crash.when, functions, text)
    )
    return next(fitting, None)


def known_crashes() -> tuple[Crash, ...]:
    """List all known crashes, in order of trust."""
    return load("crashes", "crash", tuple[Crash, ...])


def core_limit(launcher: str) -> CoreLimit:
    """Return how to raise the core size limit: for a launcher of rank_identity, a container, or "systemd"."""
    names = {"Open MPI": "mpirun", "MPICH": "mpirun", "MVAPICH2": "mpirun"}
    known = load("crashes", "limit", dict[str, CoreLimit])
    return known.get(names.get(launcher, launcher), known["shell"])


def meaning(signal: int, code: int | None, address: int | None, sender_pid: int | None, own_pid: int | None) -> str:
    """Describe a signal; the text follows the signal's name and ": ".

    Args:
        code: si_code of sigaction(2); None if unknown.
        address: si_addr; None if unknown.
        sender_pid: si_pid; None if unknown, or if no process sent the signal.
        own_pid: the process that died; None if unknown.
    """
    name = signal_name(signal)
    known = load("crashes", "signal", dict[str, _Signal]).get(name)
    if code in _SENT and name != "SIGKILL":
        itself = sender_pid == own_pid if sender_pid is not None and own_pid is not None else code == _SI_TKILL
        return _sent_by_itself(name) if itself else _sent_by(sender_pid)
    if known is None:
        return "a signal that ends a process" if code is None else f"a signal that ends a process (si_code {code})"
    words = known.code.get(str(code), known.means)
    if name == "SIGSEGV" and code in (1, 2) and address is not None and address < _NEAR_NULL:
        words += ", a NULL pointer"
    return words.format(address="an unknown address" if address is None else f"{address:#x}")


def _sent_by_itself(name: str) -> str:
    if name == "SIGABRT":
        return (
            "the process aborted itself (an uncaught C++ exception, heap corruption found by the C library, "
            "a failed assertion, a fatal Python error)"
        )
    if name in _FAULTS:
        return (
            "raised again by a signal handler of the process (Python's faulthandler, or torch's in a DataLoader "
            "worker): the address is lost, the frames below the handler are those of the crash"
        )
    return "sent by the process itself"


def _sent_by(sender_pid: int | None) -> str:
    if sender_pid is None:
        return "sent by another, unknown process: the process itself did not crash"
    if sender_pid == 0:
        return "sent from outside its container (or by the kernel): the process itself did not crash"
    return f"sent by process {sender_pid}: the process itself did not crash"


def _fits(when: _When, name: str, code: int | None, address: int | None) -> bool:
    if when.signals and name not in when.signals:
        return False
    if when.codes and code not in when.codes:
        return False
    if when.address_below:
        return address is not None and when.address_from <= address < when.address_below
    return True


def _shows(when: _When, functions: Sequence[str], text: str) -> bool:
    """Return whether the evidence matches: one kind is enough; a row without evidence always matches."""
    if not (when.frames or when.text or when.repeated):
        return True
    if when.text and text and re.search(when.text, text, re.MULTILINE):
        return True
    if when.frames and _in_order(when.frames, functions[: when.within]):
        return True
    return bool(when.repeated) and max(Counter(functions).values(), default=0) >= when.repeated


def _in_order(patterns: Sequence[str], functions: Sequence[str]) -> bool:
    left = iter(functions)
    return all(any(re.search(pattern, function) for function in left) for pattern in patterns)
