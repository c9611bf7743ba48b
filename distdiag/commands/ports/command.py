"""The command line of ports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.errors import UsageError
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.ports.types import PortsData, PortsFacts, Request
    from distdiag.output import Progress
    from distdiag.runner import Subcommand
    from distdiag.saved_facts import Gathered

_MOST_TARGETS = 65536
_MOST_HOSTS = 256
"""Hosts to probe from one node; for paths between nodes see gather.MOST_NODES."""


@on_hosts
def ports(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST[:PORT]]...", help="Hosts to test from here; none: check this node."),
    ] = None,
    port: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Ports to test: 6000,29500-29510; without HOST, who listens here. [default: 29500]",
        ),
    ] = None,
    data: Annotated[str, typer.Option(metavar="SIZE", help="Data to send over each path between nodes.")] = "1MiB",
    connect_timeout: Annotated[
        float, typer.Option(min=0.1, max=120.0, metavar="SECONDS", help="Give up on a port after this long.")
    ] = 3.2,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every path, listener and interface.")] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Test whether nodes reach each other in both directions, and show which interface NCCL and Gloo use.

    Without HOST: check this node. With HOST: test its ports from here. With --hosts: test the paths between those
    nodes; without ssh, reach them with --via.

    Exit status: 0 all paths are open, 1 a path is closed, 2 wrong usage, 3 unknown, 130 interrupted.

    \b
    Examples:
      distdiag ports                       # interfaces, listeners of this node
      distdiag ports gpu07 gpu08:6000      # test ports of hosts from here
      distdiag ports --hosts 'gpu[01-08]'  # test the paths between these nodes
    """
    from distdiag import runner
    from distdiag.commands.ports.types import Request, read_ports

    words = what or []

    def request() -> Request:
        given = () if port is None else read_ports(port)  # an empty variable (--port "$PORT") is a mistake
        return Request(
            program=called_as(),
            cluster=cluster,
            targets=_targets(words, given),
            ports=given,
            named=bool(given) or _names_ports(words),
            bulk_bytes=_bulk_bytes(data),
            timeout_s=connect_timeout,
            verbose=verbose,
        )

    runner.run(_subcommand(), request, runner.Options(as_json, strict, save, from_))


def _targets(hosts: Sequence[str], ports: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Parse the hosts to try. Raises UsageError."""
    from distdiag.commands.ports.types import read_target

    if len(set(hosts)) > _MOST_HOSTS:
        raise UsageError(
            f"too many hosts to test from one node: {len(set(hosts))}", hint=f"limit: {_MOST_HOSTS} at a time"
        )
    found = [target for word in hosts for target in read_target(word, ports)]
    if len(found) > _MOST_TARGETS:
        raise UsageError(
            f"too many ports to test: {len(found)}", hint=f"limit: {_MOST_TARGETS} at a time, all hosts together"
        )
    return tuple(dict.fromkeys(found))


def _names_ports(hosts: Sequence[str]) -> bool:
    """Return whether a host was typed with a port, where a listener is then expected."""
    from distdiag.commands.ports.types import read_target

    return any(read_target(word, (1,)) == read_target(word, (2,)) for word in hosts)


def _bulk_bytes(text: str) -> int:
    """Parse --data. Raises UsageError."""
    from distdiag.agent.probe_server import MOST_BULK_BYTES
    from distdiag.options import parse_size

    size = parse_size(text)
    if not 0 < size <= MOST_BULK_BYTES:
        raise UsageError(f"--data {text}: out of range", hint=f"limit: {MOST_BULK_BYTES >> 20}MiB on each path")
    return size


def _subcommand() -> Subcommand[Request, PortsFacts, PortsData]:
    from distdiag import runner
    from distdiag.commands.ports import gather, types
    from distdiag.commands.ports.diagnose import diagnose
    from distdiag.commands.ports.view import ports_view
    from distdiag.saved_facts import Gathered

    def collect(request: Request, progress: Progress) -> Gathered[PortsFacts]:
        facts = gather.gather(request, progress)
        return Gathered(facts=[facts], interrupted=facts.interrupted)

    return runner.Subcommand(
        name=types.COMMAND,
        request=types.Request,
        facts=types.PortsFacts,
        collect=collect,
        diagnose=lambda request, gathered: diagnose(request, gathered.facts[0]),
        view=lambda request, _, report: ports_view(report, request),
        shown_as_typed=("verbose",),
        by_every_rank=True,
    )
