"""What was typed, and by which way it is answered: look around, try hosts, serve, check a server, try all pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.commands.ports.model import MOST_HOSTS, MOST_TARGETS, Request, read_target
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.ports.result import PortsData
    from distdiag.report import Report

_WORDS = ("serve", "check")


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How two nodes meet that have no ssh between them."""

    token: str = ""
    for_s: float = 600.0


def targets_of(words: Sequence[str], ports: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Read the hosts to try. Raises UsageError."""
    if words and words[0] == "serve":
        if len(words) > 1:
            raise UsageError("serve takes no hosts", hint="distdiag ports serve --port 6000")
        return ()
    hosts = words[1:] if words and words[0] == "check" else words
    if words and not hosts:
        raise UsageError("check whom?", hint="distdiag ports check node1 (on which `distdiag ports serve` runs)")
    if len(set(hosts)) > MOST_HOSTS:
        raise UsageError(
            f"{len(set(hosts))} hosts are too many to try from one node", hint=f"up to {MOST_HOSTS} at a time"
        )
    found = [target for word in hosts for target in read_target(word, ports)]
    if len(found) > MOST_TARGETS:
        raise UsageError(
            f"{len(found)} ports are too many", hint=f"up to {MOST_TARGETS} at a time, of all hosts together"
        )
    return tuple(dict.fromkeys(found))


def bulk_of(text: str) -> int:
    """Read --data. Raises UsageError."""
    from distdiag.node.probing import MOST_BULK_BYTES
    from distdiag.options import parse_size

    size = parse_size(text)
    if not 0 < size <= MOST_BULK_BYTES:
        raise UsageError(f"--data {text} is out of bounds", hint=f"up to {MOST_BULK_BYTES >> 20}MiB over each way")
    return size


def answer(request: Request, words: Sequence[str], meeting: Meeting) -> Report[PortsData]:
    """Do what was asked for.

    Raises:
        UsageError: the options contradict each other.
        DistdiagError: the node side failed, or a port cannot be listened at.
    """
    from distdiag.commands.ports.diagnose import diagnose
    from distdiag.deliver import Progress

    meets = bool(words) and words[0] in _WORDS
    if meets and request.cluster.typed():
        raise UsageError(
            f"{words[0]} works between two nodes without ssh", hint="leave out --hosts, or leave out the word"
        )
    with Progress() as progress:
        if meets:
            from distdiag.commands.ports import meet

            seen = (
                meet.serve(request, meeting, progress)
                if words[0] == "serve"
                else meet.check(request, meeting, progress)
            )
        else:
            from distdiag.commands.ports.check import look

            seen = look(request, progress)
    return diagnose(request, seen)
