"""The whole program on one page: one line per subcommand, and the handling of errors before a report."""

from __future__ import annotations

import errno
import io
import re
import sys
from typing import Annotated, Any

import typer
from typer.main import get_command

from distdiag import __version__, limits
from distdiag.errors import Interrupted
from distdiag.lazy_typer import Groups, Invocation, Sub, listing
from distdiag.output import emit, error_document, say
from distdiag.program_name import as_called

GROUPS: Groups = {
    "Start here": (
        Sub("demo", "Start a small job with a real fault, to try distdiag on it."),
        Sub("config", "Show the option defaults set by variables and files.", home="config:config"),
        Sub("skill", "Print or install the instructions for coding agents.", home="skill:skill"),
    ),
    "A stuck job": (
        Sub("hang", "Find which rank is stuck, where and why."),
        Sub("pyspy-all", "Show the stacks of all ranks (one of the sources of hang)."),
        Sub("flight-recorder", "Find the rank missing from a collective, from NCCL's or Gloo's dumps."),
        Sub(
            "trace",
            "Show what ranks wait for, and what they did last: blocked (a source of hang), fds, py, show, sys.",
            home="",
            about="Show what each rank waits for, and what it did last: system calls, lines of Python.",
            below=(
                Sub(
                    "blocked",
                    "Show what each rank waits for, from /proc (one of the sources of hang).",
                    home="trace.blocked.command:blocked",
                ),
                Sub(
                    "fds", "Show the open files of a process, and who has the other ends.", home="trace.fds.command:fds"
                ),
                Sub("py", "Run a job and record the last Python lines of every thread.", home="trace.py:trace_py"),
                Sub("show", "Show the lines that `trace py` recorded.", home="trace.show.command:trace_show"),
                Sub(
                    "sys",
                    "Trace the system calls of running ranks, or read strace logs.",
                    home="trace.sys.command:trace_sys",
                ),
            ),
        ),
    ),
    "A failed job": (
        Sub("logs", "Find the rank that failed first, and why, in a job's logs."),
        Sub("explain", "Explain an error line, a log, or a finding id."),
        Sub("run", "Start a job; if it fails, report which rank failed first, and why.", starts_job=True),
        Sub("core-bt", "Show the thread that crashed, its Python and C frames, and the reason."),
        Sub("bundle", "Collect everything about a job in one redacted file."),
    ),
    "A slow job": (Sub("allreduce-bench", "Measure collectives, and compare with the expected bandwidth."),),
    "Nodes and network": (
        Sub("doctor", "Check whether the nodes are ready for a job; find the node that differs."),
        Sub("ports", "Test the network between nodes in both directions, and the choice of NICs."),
        Sub("gpu-test", "Test communication, all_reduce, memory and compute on all ranks."),
    ),
    "Environment": (Sub("cuda-env", "Explain why CUDA does not run or build here, and how to fix it."),),
    "Numbers": (
        Sub(
            "overflow",
            "Find the rank, step and module that first produce NaN or Inf; overflow show: where numbers grew.",
            below=(
                Sub(
                    "show",
                    "Show where numbers grew, or where two runs first differ.",
                    home="overflow.show.command:overflow_show",
                ),
            ),
        ),
        Sub("floatcmp", "Compare two tensor files up to rounding; show where they first differ."),
    ),
    "In a script": (
        Sub(
            "sync-check",
            "Find the first value that differs between ranks, and the ranks.",
            home="sync_check:sync_check",
        ),
    ),
    "More": (
        Sub(
            "slurm",
            "Run recurring SLURM jobs, and check that jobs are still queued (cron, watch).",
            home="",
            about="Run recurring SLURM jobs, and check that jobs are still queued.",
            below=(
                Sub(
                    "cron", "Run a command every few hours, as a job that submits its next run.", home="slurm.cron:cron"
                ),
                Sub("watch", "Check that a job runs or waits, and that it can start.", home="slurm.watch:watch"),
            ),
        ),
        Sub(
            "kill-switch",
            "Stop a job at its next step, without permission to cancel it (on, off, status).",
            home="",
            about="Stop a job that uses `distdiag.KillSwitch` at its next step, on all ranks.",
            below=(
                Sub("on", "Turn it on: the job stops at its next step.", home="kill_switch:on"),
                Sub("off", "Turn it off, so that the next job runs.", home="kill_switch:off"),
                Sub("status", "Show whether it is on, and why.", home="kill_switch:status"),
            ),
        ),
        Sub("estimate", "Estimate TFLOPS of a training run, and the network it needs."),
    ),
    "Help": (Sub("hosts", "Host options, shared by most commands: distdiag help hosts.", home="hosts:hosts"),),
}
"""All commands by purpose; the last group has the pages of `distdiag help`."""
_SYMPTOMS = {
    "Start here": {
        "try it on a job that hangs": "demo hang",
    },
    "A stuck job": {
        "it hangs, or never starts": "hang",
        "I only need the stacks": "pyspy-all",
        "NCCL timed out and left dumps": "flight-recorder DIR",
        "it gets killed; keep its last lines": "trace py -- train.py",
    },
    "A failed job": {
        "it crashed": "logs FILE...",
        "I only have an error line": "explain 'LINE'",
        "it fails intermittently; record it": "run -- torchrun train.py",
        "it left a core file": "core-bt CORE",
        "I need evidence for a ticket": "bundle --job ID",
    },
    "A slow job": {
        "which rank is the straggler?": "pyspy-all --samples 20",
        "is it the network?": "allreduce-bench",
    },
    "Nodes and network": {
        "are the nodes ready for a job?": "doctor --hosts LIST",
        "the nodes cannot connect": "ports --hosts LIST",
        "do the GPUs and NCCL work?": "gpu-test",
    },
    "Environment": {
        "CUDA does not run or build": "cuda-env",
    },
    "Numbers": {
        "the loss is NaN": "overflow -- train.py",
        "two runs or checkpoints differ": "floatcmp A B",
    },
    "In a script": {
        "do all ranks hold the same weights?": "sync-check DIR",
    },
}
"""What users see, by group, with the words to type after `distdiag`: rows of the first screen."""
_SUBCOMMANDS = tuple(sub for title, group in GROUPS.items() for sub in group if title != "Help")
_ABOUT = "Find out why a distributed PyTorch job hangs, crashes, crawls or won't build, and how to fix it."


def _first_screen() -> str:
    """Return the overview: one command per symptom, each line within 80 columns."""
    lines = [_ABOUT.replace(", and how", ",\nand how")]
    for title, symptoms in _SYMPTOMS.items():
        lines += ["", title, *(f"  {seen:<40}distdiag {words}" for seen, words in symptoms.items())]
    return "\n".join([*lines, "", "All commands: distdiag --help. Options and examples: distdiag COMMAND -h.\n"])


def _program() -> typer.Typer:
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
    program = listing("distdiag", GROUPS, _ABOUT, settings, first_screen=_first_screen())
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
        typer.echo(_first_screen(), nl=False)


_WrongCommandLine: type[Any] = typer.BadParameter.__mro__[1]
"""What Typer raises for every command line that it cannot parse; it exports one kind of it only."""


def main() -> None:
    """Run distdiag; however it ends, a program that asked for JSON gets one document and the right exit status."""
    if sys.argv[1:2] == ["help"]:  # as git and others have it
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    typed = Invocation(sys.argv[1:])
    try:
        status = _run(typed)
    except typer.Exit as end:
        status = end.exit_code
    sys.exit(status)


def _run(typed: Invocation) -> int:
    """Return the exit status. Raises typer.Exit."""
    try:
        return get_command(_program()).main(standalone_mode=False, obj=typed) or 0
    except _WrongCommandLine as wrong:
        shown = io.StringIO()
        wrong.show(file=shown)
        say(shown.getvalue().rstrip("\n"))
        hint = as_called(" ".join(filter(None, ("distdiag", typed.command, "--help"))))
        if better := _hint(typed, wrong):
            hint = as_called(better)
            say(f"hint: {hint}")
        return _without_report(typed, 2, "usage", wrong.format_message(), hint)
    except (Interrupted, KeyboardInterrupt):
        return _interrupted(typed)
    except Exception as bug:  # noqa: BLE001 - the last boundary: status 1 would say that a fault of the job was found
        if isinstance(bug.__cause__, KeyboardInterrupt):  # Python 3.11 raises a RuntimeError from it in __set_name__
            return _interrupted(typed)
        if scarce := _scarce(bug):
            hint = limits.hint_for(scarce)
            say(f"distdiag: {scarce}\nhint: {hint}")
            return _without_report(typed, 3, "scarce", scarce, hint)
        import traceback

        say(traceback.format_exc().rstrip("\n"))
        words = f"bug in distdiag: {type(bug).__name__}: {bug}"
        return _without_report(typed, 3, "distdiag.bug", words)


def _interrupted(typed: Invocation) -> int:
    say(f"distdiag: {Interrupted()}")
    return _without_report(typed, Interrupted.exit_code, Interrupted.id, str(Interrupted()))


def _hint(typed: Invocation, wrong: Any) -> str:  # noqa: ANN401 - Typer's error is private
    """Return a correction for a nearly right command line, or the origin of a wrong default; "" if neither applies."""
    message = wrong.format_message()
    parameter = getattr(getattr(wrong, "param", None), "name", "")
    if wrong_default := next((each for each in typed.used if each.parameter == parameter), None):
        return f"{wrong_default.option} is set by {wrong_default.origin}"
    is_cuda_env = typed.command == "cuda-env"
    if is_cuda_env and (extra := re.search(r"unexpected extra arguments?(?:\(s\))? \((\S+?)[ )]", message)):
        return f"to explain a log: distdiag cuda-env --explain {extra[1]}"
    if is_cuda_env and "'--explain' requires" in message:
        return "distdiag cuda-env --explain build.log, or - to read stdin"
    return ""


def _without_report(typed: Invocation, code: int, id_: str, message: str, hint: str = "") -> int:
    if typed.as_json and typed.is_for_all:
        emit(error_document(typed.command, code, id_, message, hint))
    return code


def _scarce(error: Exception) -> str:
    """Return the exhausted resource; empty if the error has another cause."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return "Too many open files"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        return "cannot start a process or thread: Resource temporarily unavailable"
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return "distdiag is out of memory: Cannot allocate memory"
    return ""
