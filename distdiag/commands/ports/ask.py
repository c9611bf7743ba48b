"""What was typed, and by which way it is answered: look around, try hosts, serve, check a server, try all pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.commands.ports.check import AGENT, Seen, look
from distdiag.commands.ports.diagnose import diagnose
from distdiag.commands.ports.model import COMMAND, MOST_HOSTS, MOST_TARGETS, Request, read_target
from distdiag.commands.ports.view import ports_view
from distdiag.errors import UsageError
from distdiag.gathered import Gathered
from distdiag.runner import Subcommand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.ports.result import PortsData
    from distdiag.deliver import Progress

_WORDS = ("serve", "check")


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How two nodes meet that have no ssh between them."""

    token_file: str = ""
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


def names_ports(words: Sequence[str]) -> bool:
    """Whether a port was typed with one of the hosts: whoever names a port means that somebody listens there."""
    hosts = [word for word in words if word not in _WORDS]
    return any(read_target(word, (1,)) == read_target(word, (2,)) for word in hosts)


def token_of(path: str) -> str:
    """Read --token-file, or the environment without it. Raises UsageError."""
    from distdiag.node import handshake

    try:
        return handshake.given_token(path)
    except OSError as error:
        raise UsageError(
            f"--token-file {path}: {error.strerror}", hint="name a file that holds the token, or - for stdin"
        ) from error


def bulk_of(text: str) -> int:
    """Read --data. Raises UsageError."""
    from distdiag.node.probing import MOST_BULK_BYTES
    from distdiag.options import parse_size

    size = parse_size(text)
    if not 0 < size <= MOST_BULK_BYTES:
        raise UsageError(f"--data {text} is out of bounds", hint=f"up to {MOST_BULK_BYTES >> 20}MiB over each way")
    return size


def subcommand(words: Sequence[str], meeting: Meeting) -> Subcommand[Request, Seen, PortsData]:
    """Make the command of what was typed."""

    def collect(request: Request, progress: Progress) -> Gathered[Seen]:
        seen = _look(request, words, meeting, progress)
        return Gathered(facts=[seen], interrupted=seen.interrupted)

    return Subcommand(
        name=COMMAND,
        request=Request,
        facts=Seen,
        collect=collect,
        diagnose=lambda request, gathered: diagnose(request, gathered.facts[0]),
        view=lambda request, _, report: ports_view(report, request),
        explain=lambda request: runner.explain(request.cluster, AGENT),
        shown_as_typed=("verbose",),
        by_every_rank=True,
    )


def _look(request: Request, words: Sequence[str], meeting: Meeting, progress: Progress) -> Seen:
    """Do what was asked for. Raises UsageError, DistdiagError."""
    if not words or words[0] not in _WORDS:
        return look(request, progress)
    if request.cluster.typed():
        raise UsageError(
            f"{words[0]} works between two nodes without ssh", hint="leave out --hosts, or leave out the word"
        )
    from distdiag.commands.ports import meet

    meeting = replace(meeting, token=token_of(meeting.token_file))
    return (meet.serve if words[0] == "serve" else meet.check)(request, meeting, progress)
