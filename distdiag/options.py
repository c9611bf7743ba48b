"""Options that several commands share, each declared once."""

from __future__ import annotations

import functools
import inspect
import os
import re
import tempfile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distdiag.cluster.pods import Kube
from distdiag.cluster.targets import Cluster, Launcher
from distdiag.errors import UsageError
from distdiag.program_name import called_as as called_as  # the commands import it from here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "t": 10**12, "ti": 2**40}


def parse_size(text: str) -> int:
    """Parse a number of bytes: 4096, 64MiB, 1.5GiB, 500MB. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="give bytes, or use a unit: 4096, 64MiB, 1GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, option: str, *, longest_s: float) -> float:
    """Parse a time in seconds: 5, 5s, 500ms, 2m, 1h, 1d. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|)\s*", text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if match is None:
        raise UsageError(f"{option}: {text!r} is not a time", hint="write seconds, or a unit: 5, 5s, 500ms, 2m")
    if not 0.0 < seconds <= longest_s:
        most = f"{longest_s / 60:g}m" if longest_s >= 60 else f"{longest_s:g}s"
        how = "short" if not seconds else "long"
        raise UsageError(f"{option}: {text} is too {how}", hint=f"more than 0, at most {most}")
    return seconds


_MOST_NUMBERS = 100_000


def parse_ranks(texts: Iterable[str]) -> tuple[int, ...]:
    """Parse --rank: "3", "0-3,7". Raises UsageError."""
    return parse_numbers(texts, "--rank", "rank", "ranks")


def parse_numbers(texts: Iterable[str], option: str, noun: str, plural: str) -> tuple[int, ...]:
    """Parse numbers and ranges with commas, in ascending order. Raises UsageError."""
    found: set[int] = set()
    for part in (part.strip() for text in texts for part in text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + _MOST_NUMBERS:
            raise UsageError(
                f"{option}: {part!r} is not a {noun} or a range of {plural}", hint=f"write {plural} as 0-3,8"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def split_pids(words: Iterable[str]) -> tuple[list[str], list[int]]:
    """Separate names of files from process ids; an existing file wins."""
    words = list(words)
    paths = [word for word in words if not re.fullmatch(r"[1-9][0-9]{0,9}", word) or os.path.lexists(word)]
    return paths, [int(word) for word in words if word not in paths]


_output_option = functools.partial(typer.Option, rich_help_panel="Output")
JsonOpt = Annotated[bool, _output_option("--json", help="Print a single JSON document to stdout.")]
StrictOpt = Annotated[bool, _output_option("--strict", help="Treat warnings as failures (exit 1).")]
SaveOpt = Annotated[
    str, _output_option("--save", metavar="DIR", help="Save the facts of this run to DIR, one file per host.")
]
FromOpt = Annotated[
    list[str] | None,
    _output_option(
        "--from", metavar="PATH", help="Analyze saved facts: a DIR of --save, its files or a bundle; repeatable."
    ),
]
HtmlOpt = Annotated[
    str, _output_option("--html", metavar="FILE", help="Write the report as an offline page for a browser.")
]
JobOpt = Annotated[
    str,
    typer.Option(
        "--job", metavar="ID", help="Only this job: torchrun's run id, MASTER_ADDR:MASTER_PORT or a SLURM id."
    ),
]
UserOpt = Annotated[
    str, typer.Option("--user", metavar="NAME", help="Only this user's processes. [default: all visible]")
]
StallOpt = Annotated[
    float,
    typer.Option(min=1.0, max=86400.0, metavar="SECONDS", help="Fail when no rank makes progress for this long."),
]


_host_option = functools.partial(typer.Option, rich_help_panel="Hosts")


def _cluster(  # noqa: PLR0913 - an option is an argument
    hosts: Annotated[
        str | None,
        _host_option(metavar="LIST", help="Hosts to use: node[1-4],gpu7 or user@node1:8 (8 ranks there)."),
    ] = None,
    hostfile: Annotated[
        str | None,
        _host_option(metavar="FILE", help="File of hosts: Open MPI, MPICH, DeepSpeed, PBS or plain lines."),
    ] = None,
    slurm_job: Annotated[str, _host_option(metavar="ID", help="Use the nodes of this running SLURM job.")] = "",
    kube: Annotated[
        str | None,
        _host_option(
            metavar="SELECTOR", help="Use these pods: a label (app=train), pytorchjob/NAME, job/NAME, pod/NAME."
        ),
    ] = None,
    namespace: Annotated[str, _host_option(metavar="NAME", help="Namespace of --kube. [default: kubectl's]")] = "",
    context: Annotated[str, _host_option(metavar="NAME", help="Context of --kube. [default: kubectl's]")] = "",
    container: Annotated[str, _host_option(metavar="NAME", help="Container of --kube. [default: the pod's own]")] = "",
    kube_debug: Annotated[
        str,
        _host_option(metavar="IMAGE", help="Inspect the --kube pods from a debug container running this image."),
    ] = "",
    via: Annotated[
        str,
        _host_option(metavar="COMMAND", help='Command that starts a program on {host}: "kubectl exec -i {host} --".'),
    ] = "",
    launcher: Annotated[
        Launcher, _host_option(help="How to start processes on hosts; auto: ssh, or srun inside an allocation.")
    ] = Launcher.AUTO,
    python: Annotated[
        str, _host_option(metavar="PATH", help="Python on the hosts. [default: same path as here, else python3]")
    ] = "",
    env: Annotated[
        list[str] | None,
        _host_option(metavar="NAME[=VALUE]", help="Variable to set on the hosts; repeatable."),
    ] = None,
    setup: Annotated[
        str, _host_option(metavar="COMMANDS", help="Shell commands to run first on each host: 'source ~/env.sh'.")
    ] = "",
    fanout: Annotated[int | None, _host_option(min=1, metavar="N", help="Maximum parallel logins.")] = None,
    host_timeout: Annotated[
        float | None,
        _host_option(min=0.1, metavar="SECONDS", help="Time limit for each stage of connecting to a host."),
    ] = None,
    accept_new: Annotated[
        bool, _host_option("--accept-new", help="Accept and store unknown ssh host keys (never changed keys).")
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
        kube=_kube(_given(kube), namespace, context, container, kube_debug),
    )


def _kube(selector: str, namespace: str, context: str, container: str, debug_image: str) -> Kube | None:
    if not any((selector, namespace, context, container, debug_image)):
        return None
    return Kube(selector=selector, namespace=namespace, context=context, container=container, debug_image=debug_image)


def _given(text: str | None) -> str:
    return "" if text is None else text or " "


def on_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select hosts to a command, which receives them as `cluster`.

    A command's own option replaces a shared one of the same name, which keeps its default.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "cluster"
    ]
    names = {parameter.name for parameter in own}
    all_shared = inspect.signature(_cluster, eval_str=True).parameters.values()
    shared = [parameter for parameter in all_shared if parameter.name not in names]

    @functools.wraps(command)
    def with_hosts(**given: Any) -> None:  # noqa: ANN401 - what typer parsed
        chosen = {parameter.name: given.pop(parameter.name) for parameter in shared}
        command(**given, cluster=_cluster(**chosen))

    # typer reads both of these.
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *shared)]
    with_hosts.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_hosts.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del with_hosts.__wrapped__  # it would be asked instead of the signature
    return with_hosts


def answer_as(ctx: typer.Context, words: Sequence[str], stdin: str | None = None) -> None:
    """Run another command, as typed, in place of this one. `stdin`: its input, if this command has already read it."""
    root = ctx.find_root()
    root.obj.command, root.obj.words = "", list(words)
    with tempfile.TemporaryFile() as file:
        if stdin is not None:
            file.write(stdin.encode("utf-8", "replace"))
            file.seek(0)
            os.dup2(file.fileno(), 0)
        name, command, rest = root.command.resolve_command(root, list(words))  # type: ignore[attr-defined]
        with command.make_context(name, rest, parent=root) as context:
            command.invoke(context)
