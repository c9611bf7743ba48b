"""The whole program on one page: one line for each subcommand, and what happens when there is no report."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
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
from distdiag.program_name import as_called

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Sub:
    """One subcommand. `home`: module below distdiag.commands and function; empty where it only has subcommands.

    `starts_job`: its first word that is no option begins another program's command line, with or without `--`.
    """

    name: str
    home: str
    help: str
    about: str = ""
    """Shown on its own page instead of `help`, where it only has subcommands."""
    below: tuple[Sub, ...] = ()
    """Subcommands of it: `distdiag overflow -- train.py`, `distdiag overflow show FILE`."""
    starts_job: bool = False


_SUBCOMMANDS: tuple[Sub, ...] = (
    Sub(
        "gpu-test",
        "gpu_test.command:gpu_test",
        "Test that all ranks communicate, reduce correctly and can use their memory.",
    ),
    Sub(
        "allreduce-bench",
        "allreduce_bench.command:allreduce_bench",
        "Measure collectives, compare with the expected bandwidth, name late ranks.",
    ),
    Sub(
        "run",
        "run.command:run",
        "Start a job; if it fails, report which rank failed first, and why.",
        starts_job=True,
    ),
    Sub("demo", "demo.command:demo", "Start a small job with a real fault, to try a diagnosis on."),
    Sub("hang", "hang.command:hang", "Diagnose a stuck job: which rank holds it up, and why, from all evidence."),
    Sub(
        "pyspy-all",
        "pyspy_all.command:pyspy_all",
        "Show what every rank of a hung job is doing, and name the stuck rank.",
    ),
    Sub(
        "trace",
        "",
        "Show what ranks are blocked on and did last (blocked, fds, py, show, sys).",
        about="Show what each rank is blocked on, and what it did last: system calls, lines of Python.",
        below=(
            Sub(
                "blocked",
                "trace.blocked.command:blocked",
                "Show what each rank is blocked on, and the rank that all wait for.",
            ),
            Sub(
                "fds", "trace.fds.command:fds", "Show the file descriptors of a process, and who holds the other ends."
            ),
            Sub("py", "trace.py:trace_py", "Run a job and record the last Python lines of every thread."),
            Sub("show", "trace.show.command:trace_show", "Show the last lines of each rank that `trace py` recorded."),
            Sub(
                "sys",
                "trace.sys.command:trace_sys",
                "Trace system calls of running ranks, or read strace logs.",
            ),
        ),
    ),
    Sub(
        "overflow",
        "overflow.command:overflow",
        "Find the rank, step and module that first produce NaN or Inf.",
        below=(
            Sub(
                "show",
                "overflow.show.command:overflow_show",
                "Show where numbers grew, or where two runs first differ.",
            ),
        ),
    ),
    Sub(
        "flight-recorder",
        "flight_recorder.command:flight_recorder",
        "Name the rank missing from a collective, from flight recorder dumps.",
    ),
    Sub("core-bt", "core_bt.command:core_bt", "Show what crashed, in which thread, in Python and C, and why."),
    Sub("logs", "logs.command:logs", "Name the rank that failed first, and why, from a job's logs."),
    Sub("explain", "explain.command:explain", "Explain an error line, a log file, or the id of a finding."),
    Sub("doctor", "doctor.command:doctor", "Check before a job whether the nodes are fit; name the node that differs."),
    Sub("ports", "ports.command:ports", "Test the network between nodes, in both directions, and NIC selection."),
    Sub("cuda-env", "cuda_env.command:cuda_env", "Show why CUDA does not run or build here, and how to fix it."),
    Sub(
        "floatcmp",
        "floatcmp.command:floatcmp",
        "Compare two tensor files up to rounding; show where they first differ.",
    ),
    Sub("sync-check", "sync_check:sync_check", "Name the first value that differs between ranks, and the ranks."),
    Sub(
        "kill-switch",
        "",
        "End a job cleanly at its next step, on all ranks (on, off, status).",
        about="End a job that uses `distdiag.KillSwitch` cleanly at its next step, on all ranks.",
        below=(
            Sub("on", "kill_switch:on", "Turn it on: the job stops at its next step."),
            Sub("off", "kill_switch:off", "Turn it off, so that the next job runs."),
            Sub("status", "kill_switch:status", "Show whether it is on, and why."),
        ),
    ),
    Sub(
        "bundle",
        "bundle.command:bundle",
        "Collect all evidence of a job in one redacted file, for a ticket or a colleague.",
    ),
    Sub("estimate", "estimate.command:estimate", "Estimate TFLOPS of a training run, and the network it needs."),
    Sub(
        "slurm",
        "",
        "Run a command every few hours under SLURM; check that a job is in the queue (cron, watch).",
        about="Batch jobs that repeat, and jobs that should be in the queue.",
        below=(
            Sub("cron", "slurm.cron:cron", "Run a command every few hours, as a job that submits its next run."),
            Sub("watch", "slurm.watch:watch", "Check that a job runs or waits, and that it can start."),
        ),
    ),
)


_SYMPTOMS = (
    ("nothing yet: try it on a job that hangs", "demo hang"),
    ("the job hangs", "hang"),
    ("  and you want every stack", "pyspy-all"),
    ("  in a collective (flight recorder on)", "flight-recorder DUMP..."),
    ("  in a lock, pipe, socket or file system", "trace blocked --job ID"),
    ("  and py-spy cannot attach: rerun it", "trace py -- train.py"),
    ("the job is slow: which rank?", "pyspy-all --samples 20"),
    ("  is it the network?", "allreduce-bench"),
    ("  and a rank is busy in system calls", "trace sys --rank N"),
    ("the job crashed", "logs FILE..."),
    ("  and the first error was lost: rerun it", "run -- torchrun train.py"),
    ("  and left a core file", "core-bt CORE"),
    ("  with too many open files", "trace fds PID"),
    ("the loss is NaN or Inf, or overflows", "overflow -- train.py"),
    ("two runs or checkpoints differ", "floatcmp A B"),
    ("do all ranks hold the same weights?", "sync-check DIR"),
    ("I have an error line, or a log", "explain LINE|FILE"),
    ("an extension won't build", "cuda-env"),
    ("CUDA is not available", "cuda-env"),
    ("NCCL or torchrun won't connect", "ports --hosts LIST"),
    ("is this cluster fit to start?", "doctor --hosts LIST"),
    ("do its GPUs and NCCL work?", "gpu-test"),
    ("I must end a job that I may not cancel", "kill-switch on PATH"),
    ("is this training speed good?", "estimate"),
    ("I must file a ticket, or ask a colleague", "bundle --job ID"),
    ("the logs of many ranks are unreadable", "logs FILE..."),
    ("is my training job still in the queue?", "slurm watch NAME"),
)
"""What users see, and the command for it; each line fits 80 columns."""


def _symptom_table() -> str:
    rows = [f"  {symptom:<42}distdiag {command}" for symptom, command in _SYMPTOMS]
    end = "All commands: distdiag --help. Options and examples: distdiag COMMAND --help."
    return "\n".join(["Find the problem of a distributed PyTorch job:", "", *rows, "", end])


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
        """Whether this process reports for all that a launcher started: they share one stdout."""
        from distdiag.facts.rank_identity import identify

        me = identify(os.environ)
        return me is None or me.rank == 0 or me.launcher == "environment"


def _interruptible(command: Callable[..., None], typed: _Invocation) -> Callable[..., None]:
    """Return a command that can be interrupted from the moment on that its --json is known."""

    @functools.wraps(command)
    def run(**options: Any) -> None:  # noqa: ANN401 - what Typer parsed
        typed.parsed_json = bool(options.get("as_json"))
        interrupts.release()
        command(**options)

    return run


def _group(subcommands: Sequence[Sub]) -> type[TyperGroup]:
    """Return a group that loads the subcommand that is called: of the others the name and a line of help will do.

    This subclasses a class that Typer does not promise, as there is no public way: Typer offers no lazy command, a
    class of the package click is none of Typer's, and a command that hands its words on to a second program loses the
    completion of its options, unless TAB loads every command or guesses the command before it is parsed.
    """
    by_name = {subcommand.name: subcommand for subcommand in subcommands}

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
            name, command, rest = super().resolve_command(ctx, args)
            if command is not None:
                ctx.obj.command = f"{ctx.obj.command} {name}".strip()
                command = _load(by_name[str(name)], rest, ctx.obj)
            return name, command, rest

        def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:  # Typer would make a mere exit status of it
                raise Interrupted from None

    return Group


class _Command(TyperCommand):
    """A command whose usage names what is required as manuals do: A B, not {A} {B}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401
        pieces = super().collect_usage_pieces(ctx)
        return [piece[1:-1] if piece[:1] + piece[-1:] == "{}" else piece for piece in pieces]


def _load(subcommand: Sub, words: Sequence[str], typed: _Invocation) -> Any:  # noqa: ANN401 - Typer's command is private
    if not subcommand.home or (words and words[0] in [below.name for below in subcommand.below]):
        return get_command(_listing(subcommand.name, subcommand.below, subcommand.about or subcommand.help))
    module, _, function = subcommand.home.partition(":")
    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    command = getattr(import_module(f"distdiag.commands.{module}"), function)
    settings = {"allow_interspersed_args": not subcommand.starts_job}
    program.command(subcommand.name, cls=_Command, context_settings=settings)(_interruptible(command, typed))
    return get_command(program)


def _listing(
    name: str,
    subcommands: Sequence[Sub],
    about: str,
    settings: dict[str, Any] | None = None,
    *,
    is_top: bool = False,
) -> typer.Typer:
    listing = typer.Typer(
        name=name,
        cls=_group(subcommands),
        help=about,
        no_args_is_help=not is_top,
        invoke_without_command=is_top,
        # Plain text: it pastes, reads the same in a pipe, and spares every TAB the import of rich.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=settings,
        add_completion=is_top,
    )
    listing.callback()(lambda: None)
    for subcommand in subcommands:
        listing.command(subcommand.name, short_help=subcommand.help)(_not_loaded)
    return listing


def _not_loaded() -> None:
    raise RuntimeError("called a subcommand that is not loaded")


def _program() -> typer.Typer:
    program = _listing(
        "distdiag",
        _SUBCOMMANDS,
        "Find the rank, GPU, link or setting that makes a distributed PyTorch job slow, hang or fail, and the fix.",
        {"help_option_names": ["-h", "--help"], "max_content_width": 100},
        is_top=True,
    )
    program.callback()(_main)
    return program


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"distdiag {__version__}")
        raise typer.Exit


def _main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(_symptom_table())


_WrongCommandLine: type[Any] = typer.BadParameter.__mro__[1]
"""What Typer raises for every command line that it cannot parse; it exports one kind of it only."""


def main() -> None:
    """Run distdiag; however it ends, a program that asked for JSON gets one document and the right exit status."""
    if sys.argv[1:2] == ["help"]:  # as git and others have it
        sys.argv[1:] = [*sys.argv[2:], "--help"]
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
        hint = as_called(" ".join(filter(None, ("distdiag", typed.command, "--help"))))
        if better := _hint(typed.command, wrong.format_message()):
            hint = as_called(better)
            say(f"hint: {hint}")
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
        words = f"bug in distdiag: {type(bug).__name__}: {bug}"
        return _without_report(typed, 3, "distdiag.bug", words)


def _hint(command: str, message: str) -> str:
    """Return what was meant where a command line is nearly right; empty if that is not known."""
    if command == "cuda-env" and (extra := re.search(r"unexpected extra arguments?(?:\(s\))? \((\S+?)[ )]", message)):
        return f"to explain a log: distdiag cuda-env --explain {extra[1]}"
    if command == "cuda-env" and "'--explain' requires" in message:
        return "distdiag cuda-env --explain build.log, or - to read stdin"
    return ""


def _without_report(typed: _Invocation, code: int, id_: str, message: str, hint: str = "") -> int:
    if typed.as_json and typed.is_for_all:
        emit(error_document(typed.command, code, id_, message, hint))
    return code


def _scarce(error: Exception) -> str:
    """Return which resource ran out; empty if the error has another cause."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return "Too many open files"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        return "cannot start a process or thread: Resource temporarily unavailable"
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return "distdiag is out of memory: Cannot allocate memory"
    return ""
