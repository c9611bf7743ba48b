"""Options that several commands share, each declared once."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distdiag.cluster.targets import Cluster, Launcher
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "t": 10**12, "ti": 2**40}


def parse_size(text: str) -> int:
    """Read a number of bytes: 4096, 64MiB, 1.5GiB, 500MB. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write bytes, or a unit: 4096, 64MiB, 1GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def called_as() -> str:
    """Say how this program was called, so that the commands we print paste: by name, by path, or as a module."""
    import shutil

    called = sys.argv[0]
    if called.endswith("__main__.py"):
        return f"{shlex.quote(sys.executable)} -m distdiag"
    on_path = shutil.which("distdiag")
    return (
        "distdiag"
        if on_path and os.path.exists(called) and os.path.samefile(on_path, called)
        else shlex.quote(os.path.abspath(called))
    )


JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
StrictOpt = Annotated[bool, typer.Option("--strict", help="Let warnings count as faults (exit 1).")]
SaveOpt = Annotated[
    str, typer.Option("--save", metavar="DIR", help="Save the facts of this run there, a file for each host.")
]
FromOpt = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="PATH", help="Judge facts that --save wrote: DIR, or its files; can be repeated."),
]
TimeoutOpt = Annotated[
    float,
    typer.Option(min=1.0, max=86400.0, metavar="SECONDS", help="Longest time without a step of any rank."),
]


def _cluster(  # noqa: PLR0913 - an option is an argument
    hosts: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Hosts to work on: node[1-4],gpu7 or user@node1:8 (8 ranks there)."),
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A file of hosts: Open MPI, MPICH, DeepSpeed, PBS or plain lines."),
    ] = None,
    slurm_job: Annotated[str, typer.Option(metavar="ID", help="The nodes of a running SLURM job.")] = "",
    via: Annotated[
        str,
        typer.Option(metavar="COMMAND", help='Command that runs a program on {host}: "kubectl exec -i {host} --".'),
    ] = "",
    launcher: Annotated[
        Launcher, typer.Option(help="How to get to the hosts; auto: ssh, or srun inside an allocation.")
    ] = Launcher.AUTO,
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Python on the hosts. [default: this one's path there, else python3]")
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Variable to set on the hosts; can be repeated."),
    ] = None,
    setup: Annotated[
        str, typer.Option(metavar="COMMANDS", help="Shell commands to run there first: 'source ~/env.sh'.")
    ] = "",
    fanout: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Hosts to be logged in to at the same time.")
    ] = None,
    host_timeout: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Longest time for each stage of reaching a host."),
    ] = None,
    accept_new: Annotated[
        bool, typer.Option("--accept-new", help="Accept unknown ssh host keys (never changed ones) and remember them.")
    ] = False,
    explain_transport: Annotated[
        bool, typer.Option("--explain-transport", help="Print the commands that reach the hosts, and stop.")
    ] = False,
) -> Cluster:
    return Cluster(
        # An empty variable (--hosts "$NODES") is a mistake, and not this machine.
        hosts=_given(hosts),
        hostfile=_given(hostfile),
        slurm_job=slurm_job,
        via=via,
        launcher=launcher,
        python=python,
        env=tuple(env or ()),
        setup=setup,
        fanout=fanout,
        host_timeout_s=host_timeout,
        accept_new=accept_new,
        explain=explain_transport,
    )


def _given(text: str | None) -> str:
    return "" if text is None else text or " "


def on_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say on which hosts it works; it gets them all as its argument `cluster`.

    An option of the command's own goes before a shared one of the same name, which has its default then.
    """
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "cluster"]
    names = {one.name for one in own}
    shared = [one for one in inspect.signature(_cluster, eval_str=True).parameters.values() if one.name not in names]

    @functools.wraps(command)
    def with_hosts(**given: Any) -> None:  # noqa: ANN401 - what typer parsed
        chosen = {one.name: given.pop(one.name) for one in shared}
        command(**given, cluster=_cluster(**chosen))

    # typer reads both of these.
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *shared)]
    with_hosts.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_hosts.__annotations__ = {one.name: one.annotation for one in parameters}
    del with_hosts.__wrapped__  # it would be asked instead of the signature
    return with_hosts
