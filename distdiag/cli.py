"""The whole program on one page: one line for each subcommand, and what happens when there is no report."""

from __future__ import annotations

import errno
import io
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from distdiag import __version__, interrupts, limits
from distdiag.errors import Interrupted
from distdiag.output import emit, error_document, say

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Sub:
    """One subcommand. `home`: its module below distdiag.commands and its function; empty where it only has others."""

    name: str
    home: str
    help: str
    about: str = ""
    """What its own page says instead of `help`, where it only has others."""
    below: tuple[Sub, ...] = ()
    """Subcommands of it: `distdiag overflow -- train.py`, `distdiag overflow show FILE`."""


_SUBCOMMANDS: tuple[Sub, ...] = (
    Sub("gpu-test", "gpu_test.command:gpu_test", "Test communication, all_reduce and memory on every rank."),
    Sub(
        "allreduce-bench",
        "allreduce_bench.command:allreduce_bench",
        "Measure the bandwidth of collectives and judge it.",
    ),
    Sub("run", "run.command:run", "Start a job; if it fails, report which rank failed first, and why."),
    Sub("hang", "hang.command:hang", "Diagnose a stuck job: which rank holds it up, and why, from all evidence."),
    Sub(
        "pyspy-all",
        "pyspy_all.command:pyspy_all",
        "Where does every rank of a hung job stand, and which one is not where the others are?",
    ),
    Sub(
        "trace",
        "",
        "What is every rank blocked on, and what did it do last? (blocked, fds, py, show, sys)",
        about="What did each rank do last: its system calls, its lines of Python; and what is it blocked on?",
        below=(
            Sub("blocked", "trace.blocked.command:blocked", "Who is blocked on what, and whom do all ranks wait for?"),
            Sub("fds", "trace.fds.command:fds", "What are the descriptors of a process, and who has the other ends?"),
            Sub("py", "trace.py:trace_py", "Run a job and keep the last lines of Python of every thread."),
            Sub("show", "trace.show.command:trace_show", "Where was, or is, each rank? The last lines trace py kept."),
            Sub("sys", "trace.sys.command:trace_sys", "System calls of ranks that run, of a new job, or of logs."),
        ),
    ),
    Sub(
        "overflow",
        "overflow.command:overflow",
        "Where does the first nan or inf of a training run come from: which rank, step, module?",
        below=(Sub("show", "overflow.show.command:overflow_show", "Where did the numbers grow, or two runs part?"),),
    ),
    Sub(
        "flight-recorder",
        "flight_recorder.command:flight_recorder",
        "Show who is stuck in which collective, and why, from PyTorch flight recorder dumps.",
    ),
    Sub("core-bt", "core_bt.command:core_bt", "What crashed, in which thread, in Python and in C, and why?"),
    Sub("logs", "logs.command:logs", "Which rank failed first, and why? From the output of a whole job."),
    Sub("ports", "ports.command:ports", "Can the nodes reach each other, on which interface, both ways?"),
    Sub("cuda-env", "cuda_env.command:cuda_env", "Why does CUDA not run or build here, and what mends it?"),
    Sub(
        "floatcmp",
        "floatcmp.command:floatcmp",
        "Are two files of tensors the same but for rounding, and where do they part?",
    ),
)


@dataclass
class _Invocation:
    """What is known of the command line so far; each context has it as its `obj`."""

    words: Sequence[str]
    command: str = ""
    parsed_json: bool | None = None

    @property
    def as_json(self) -> bool:
        """Whether --json was given; of a command line that cannot be parsed, whether it has that word.

        What follows `--` is another program's.
        """
        if self.parsed_json is not None:
            return self.parsed_json
        words = list(self.words)
        return "--json" in (words[: words.index("--")] if "--" in words else words)

    @property
    def is_for_all(self) -> bool:
        """Whether this process speaks for all that a launcher started: their stdout is one."""
        from distdiag.facts.rank_identity import identify

        me = identify(os.environ)
        return me is None or me.rank == 0 or me.launcher == "environment"


class _Command(TyperCommand):
    """A subcommand that can be interrupted once it is known which one it is, and whether JSON is wanted."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - Typer's context is private
        """Run it."""
        ctx.obj.parsed_json = bool(ctx.params.get("as_json"))
        interrupts.release()
        return super().invoke(ctx)


def _group(subcommands: Sequence[Sub]) -> type[TyperGroup]:
    """Return a group that loads the subcommand that is called: of the others the name and a line of help will do."""
    by_name = {subcommand.name: subcommand for subcommand in subcommands}

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
            name, command, rest = super().resolve_command(ctx, args)
            if command is not None:
                ctx.obj.command = f"{ctx.obj.command} {name}".strip()
                command = _load(by_name[str(name)], rest)
            return name, command, rest

        def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:  # Typer would make a mere exit status of it
                raise Interrupted from None

    return Group


def _load(subcommand: Sub, words: Sequence[str]) -> Any:  # noqa: ANN401 - Typer's command is private
    if not subcommand.home or (words and words[0] in [below.name for below in subcommand.below]):
        return get_command(_listing(subcommand.name, subcommand.below, subcommand.about or subcommand.help))
    module, _, function = subcommand.home.partition(":")
    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    program.command(subcommand.name, cls=_Command)(getattr(import_module(f"distdiag.commands.{module}"), function))
    return get_command(program)


def _listing(
    name: str,
    subcommands: Sequence[Sub],
    about: str,
    settings: dict[str, Any] | None = None,
    *,
    add_completion: bool = False,
) -> typer.Typer:
    listing = typer.Typer(
        name=name,
        cls=_group(subcommands),
        help=about,
        no_args_is_help=True,
        # Plain text: it pastes, reads the same in a pipe, and spares every TAB the import of rich.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=settings,
        add_completion=add_completion,
    )
    listing.callback()(lambda: None)
    for subcommand in subcommands:
        listing.command(subcommand.name, short_help=subcommand.help)(_not_loaded)
    return listing


def _not_loaded() -> None:
    raise RuntimeError("a subcommand that was not loaded is called")


def _program() -> typer.Typer:
    program = _listing(
        "distdiag",
        _SUBCOMMANDS,
        "Find which rank, GPU, link or setting makes a distributed PyTorch job slow, hang or fail, and the fix.",
        {"help_option_names": ["-h", "--help"], "max_content_width": 100},
        add_completion=True,
    )
    program.callback()(_main)
    return program


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"distdiag {__version__}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


_WrongCommandLine: type[Any] = typer.BadParameter.__mro__[1]
"""What Typer raises for every command line that it cannot parse; it exports one kind of it only."""


def main() -> None:
    """Run distdiag; however it ends, a program that asked for JSON gets one document and the right exit status."""
    typed = _Invocation(sys.argv[1:])
    try:
        status = _run(typed)
    except typer.Exit as end:
        status = end.exit_code
    sys.exit(status)


def _run(typed: _Invocation) -> int:
    """Return the exit status. Raises typer.Exit."""
    try:
        return get_command(_program()).main(standalone_mode=False, obj=typed) or 0
    except _WrongCommandLine as wrong:
        shown = io.StringIO()
        wrong.show(file=shown)
        say(shown.getvalue().rstrip("\n"))
        hint = " ".join(filter(None, ("distdiag", typed.command, "--help")))
        return _without_report(typed, 2, "usage", wrong.format_message(), hint)
    except (Interrupted, KeyboardInterrupt):
        say(f"distdiag: {Interrupted()}")
        return _without_report(typed, Interrupted.exit_code, Interrupted.id, str(Interrupted()))
    except Exception as bug:  # noqa: BLE001 - the last boundary: status 1 would say that a fault of the job was found
        if scarce := _scarce(bug):
            hint = limits.hint_for(scarce)
            say(f"distdiag: {scarce}\nhint: {hint}")
            return _without_report(typed, 3, "scarce", scarce, hint)
        import traceback

        say(traceback.format_exc().rstrip("\n"))
        words = f"this is a bug of distdiag: {type(bug).__name__}: {bug}"
        return _without_report(typed, 3, "distdiag.bug", words)


def _without_report(typed: _Invocation, code: int, id_: str, message: str, hint: str = "") -> int:
    if typed.as_json and typed.is_for_all:
        emit(error_document(typed.command, code, id_, message, hint))
    return code


def _scarce(error: Exception) -> str:
    """Name what there is no more of for us; empty if that is not what went wrong."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return "Too many open files"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        return "no process or thread can be started: Resource temporarily unavailable"
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return "no memory is left for distdiag: Cannot allocate memory"
    return ""
