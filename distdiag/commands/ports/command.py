"""What you type for ports."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.ports.model import Request, read_ports
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts


@on_hosts
def ports(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST[:PORT]]... | serve | check HOST...", help="Hosts to try; none: look at this node."
        ),
    ] = None,
    port: Annotated[
        str | None, typer.Option(metavar="LIST", help="Ports to try, or to serve: 6000,29500-29510. [default: 29500]")
    ] = None,
    sample: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Ephemeral ports to try between nodes.")] = 2,
    data: Annotated[str, typer.Option(metavar="SIZE", help="Data to send over each way between nodes.")] = "1MiB",
    token_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="Token shared by serve and check; - reads stdin. [default: $DISTDIAG_TOKEN]"),
    ] = "",
    for_s: Annotated[
        float, typer.Option("--for", min=1.0, max=86400.0, metavar="SECONDS", help="How long `serve` listens.")
    ] = 600.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=120.0, metavar="SECONDS", help="Longest time for an answer of one port.")
    ] = 3.2,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every way, listener and interface.")] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
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
    from distdiag import runner
    from distdiag.commands.ports import ask

    words = what or []

    def asked() -> Request:
        given = () if port is None else read_ports(port)  # an empty variable (--port "$PORT") is a mistake
        return Request(
            program=called_as(),
            cluster=cluster,
            targets=ask.targets_of(words, given),
            ports=given,
            named=bool(given) or ask.names_ports(words),
            sample=sample,
            bulk_bytes=ask.bulk_of(data),
            timeout_s=timeout,
            verbose=verbose,
        )

    meeting = ask.Meeting(token_file=token_file, for_s=for_s)
    runner.run(ask.subcommand(words, meeting), asked, runner.Options(as_json, strict, save, from_, cluster.explain))
