"""What you type for ports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.ports.model import COMMAND, Request, read_ports
from distdiag.options import JsonOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.ports.result import PortsData
    from distdiag.report import Report


@on_hosts
def ports(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST[:PORT]]... | serve | check HOST...", help="Hosts to try; none: look at this node."
        ),
    ] = None,
    port: Annotated[
        str, typer.Option(metavar="LIST", help="Ports to try, or to serve: 6000,29500-29510. [default: 29500]")
    ] = "",
    sample: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Ephemeral ports to try between nodes.")] = 2,
    data: Annotated[str, typer.Option(metavar="SIZE", help="Data to send over each way between nodes.")] = "1MiB",
    token: Annotated[str, typer.Option(metavar="WORD", help="What `serve` and `check` know each other by.")] = "",
    for_s: Annotated[
        float, typer.Option("--for", min=1.0, max=86400.0, metavar="SECONDS", help="How long `serve` listens.")
    ] = 600.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=120.0, metavar="SECONDS", help="Longest time for an answer of one port.")
    ] = 3.2,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every way, listener and interface.")] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Say whether nodes can reach each other, both ways, on which interface, and what NCCL and Gloo would choose.

    Without hosts: this node. With hosts as arguments: their ports, from here. With --hosts: all of those among each
    other. Without ssh: `ports serve` on one node, `ports check THAT_NODE` on the other.

    Exit status: 0 all ways are open, 1 one is closed, 2 wrong usage, 3 it cannot be known, 130 interrupted.
    """
    from distdiag.deliver import Output, deliver, deliver_lines

    words = what or []

    def asked() -> Request:
        from distdiag.commands.ports.ask import bulk_of, targets_of

        given = read_ports(port)
        return Request(
            program=called_as(),
            cluster=cluster,
            targets=targets_of(words, given),
            ports=given,
            sample=sample,
            bulk_bytes=bulk_of(data),
            timeout_s=timeout,
            verbose=verbose,
        )

    def run() -> Report[PortsData]:
        from distdiag.commands.ports import ask

        return ask.answer(asked(), words, ask.Meeting(token=token, for_s=for_s))

    def view(report: Report[PortsData]) -> Iterable[RenderableType]:
        from distdiag.commands.ports.view import ports_view

        return ports_view(report, asked())

    def lines() -> list[str]:
        from distdiag.commands.ports.check import explain

        return explain(asked())

    if cluster.explain:
        deliver_lines(COMMAND, lines, as_json=as_json)
    deliver(COMMAND, run, view, Output(json=as_json, strict=strict))
