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
        Sub(
            "demo",
            "demo.command:demo",
            "Start a small job with a real fault, to try a diagnosis on.",
            symptoms=(("try it on a job that hangs", "demo hang"),),
        ),
        Sub("config", "config:config", "Show the defaults of options that variables and files set."),
        Sub("skill", "skill:skill", "Print or install the instructions for coding agents."),
    ),
    "A stuck job": (
        Sub(
            "hang",
            "hang.command:hang",
            "Find which rank is stuck, where and why.",
            symptoms=(("it hangs, or never starts", "hang"),),
        ),
        Sub(
            "pyspy-all",
            "pyspy_all.command:pyspy_all",
            "Show the stacks of all ranks (one of the sources of hang).",
            symptoms=(("I only need the stacks", "pyspy-all"),),
        ),
        Sub(
            "flight-recorder",
            "flight_recorder.command:flight_recorder",
            "Find the rank missing from a collective, from NCCL's or Gloo's dumps.",
            symptoms=(("NCCL timed out, and dumps exist", "flight-recorder DIR"),),
        ),
        Sub(
            "trace",
            "",
            "Show what ranks wait for, and what they did last: blocked (a source of hang), fds, py, show, sys.",
            about="Show what each rank waits for, and what it did last: system calls, lines of Python.",
            below=(
                Sub(
                    "blocked",
                    "trace.blocked.command:blocked",
                    "Show what each rank waits for, from /proc (one of the sources of hang).",
                ),
                Sub("fds", "trace.fds.command:fds", "Show the open files of a process, and who has the other ends."),
                Sub("py", "trace.py:trace_py", "Run a job and record the last Python lines of every thread."),
                Sub("show", "trace.show.command:trace_show", "Show the lines that `trace py` recorded."),
                Sub(
                    "sys",
                    "trace.sys.command:trace_sys",
                    "Trace the system calls of running ranks, or read strace logs.",
                ),
            ),
            symptoms=(("it will be killed; keep its last lines", "trace py -- train.py"),),
        ),
    ),
    "A failed job": (
        Sub(
            "logs",
            "logs.command:logs",
            "Find the rank that failed first, and why, in a job's logs.",
            symptoms=(("it crashed", "logs FILE..."),),
        ),
        Sub(
            "explain",
            "explain.command:explain",
            "Explain an error line, a log, or the id of a finding.",
            symptoms=(("I only have an error line", "explain 'LINE'"),),
        ),
        Sub(
            "run",
            "run.command:run",
            "Start a job; if it fails, report which rank failed first, and why.",
            starts_job=True,
            symptoms=(("it fails now and then; record it", "run -- torchrun train.py"),),
        ),
        Sub(
            "core-bt",
            "core_bt.command:core_bt",
            "Show the thread that crashed, its Python and C frames, and the reason.",
            symptoms=(("it left a core file", "core-bt CORE"),),
        ),
        Sub(
            "bundle",
            "bundle.command:bundle",
            "Collect everything about a job in one redacted file.",
            symptoms=(("I need evidence for a ticket", "bundle --job ID"),),
        ),
    ),
    "A slow job": (
        Sub(
            "allreduce-bench",
            "allreduce_bench.command:allreduce_bench",
            "Measure collectives, and compare them with the bandwidth to expect.",
            symptoms=(
                ("which rank is the straggler?", "pyspy-all --samples 20"),
                ("is it the network?", "allreduce-bench"),
            ),
        ),
    ),
    "Nodes and network": (
        Sub(
            "doctor",
            "doctor.command:doctor",
            "Check whether the nodes are ready for a job; name the node that differs.",
            symptoms=(("are the nodes ready for a job?", "doctor --hosts LIST"),),
        ),
        Sub(
            "ports",
            "ports.command:ports",
            "Test the network between nodes in both directions, and the choice of NICs.",
            symptoms=(("the nodes cannot connect", "ports --hosts LIST"),),
        ),
        Sub(
            "gpu-test",
            "gpu_test.command:gpu_test",
            "Test communication, all_reduce, memory and computing on all ranks.",
            symptoms=(("do the GPUs and NCCL work?", "gpu-test"),),
        ),
    ),
    "Environment": (
        Sub(
            "cuda-env",
            "cuda_env.command:cuda_env",
            "Explain why CUDA does not run or build here, and how to fix it.",
            symptoms=(("CUDA does not run or build", "cuda-env"),),
        ),
    ),
    "Numbers": (
        Sub(
            "overflow",
            "overflow.command:overflow",
            "Find the rank, step and module that first produce NaN or Inf; overflow show: where numbers grew.",
            below=(
                Sub(
                    "show",
                    "overflow.show.command:overflow_show",
                    "Show where numbers grew, or where two runs first differ.",
                ),
            ),
            symptoms=(("the loss is NaN", "overflow -- train.py"),),
        ),
        Sub(
            "floatcmp",
            "floatcmp.command:floatcmp",
            "Compare two tensor files up to rounding; show where they first differ.",
            symptoms=(("two runs or checkpoints differ", "floatcmp A B"),),
        ),
    ),
    "In a script": (
        Sub(
            "sync-check",
            "sync_check:sync_check",
            "Find the first value that differs between ranks, and the ranks.",
            symptoms=(("do all ranks hold the same weights?", "sync-check DIR"),),
        ),
    ),
    "More": (
        Sub(
            "slurm",
            "",
            "Run recurring SLURM jobs, and check that jobs are still queued (cron, watch).",
            about="Run recurring SLURM jobs, and check that jobs are still queued.",
            below=(
                Sub("cron", "slurm.cron:cron", "Run a command every few hours, as a job that submits its next run."),
                Sub("watch", "slurm.watch:watch", "Check that a job runs or waits, and that it can start."),
            ),
        ),
        Sub(
            "kill-switch",
            "",
            "Stop a job at its next step, without the right to cancel it (on, off, status).",
            about="Stop a job that uses `distdiag.KillSwitch` at its next step, on all ranks.",
            below=(
                Sub("on", "kill_switch:on", "Turn it on: the job stops at its next step."),
                Sub("off", "kill_switch:off", "Turn it off, so that the next job runs."),
                Sub("status", "kill_switch:status", "Show whether it is on, and why."),
            ),
        ),
        Sub("estimate", "estimate.command:estimate", "Estimate TFLOPS of a training run, and the network it needs."),
    ),
    "Help": (Sub("hosts", "hosts:hosts", "The options for hosts, which most commands share: distdiag help hosts."),),
}
"""All commands by purpose; the last group has the pages of `distdiag help`."""
_SUBCOMMANDS = tuple(sub for title, group in GROUPS.items() for sub in group if title != "Help")
_ABOUT = "Find out why a distributed PyTorch job hangs, crashes, crawls or won't build, and how to fix it."


def _first_screen() -> str:
    """Return the overview: one command per symptom, each line within 80 columns."""
    lines = [_ABOUT.replace(", and how", ",\nand how")]
    for title, group in GROUPS.items():
        rows = [f"  {seen:<40}distdiag {words}" for sub in group for seen, words in sub.symptoms]
        lines += ["", title, *rows] if rows else []
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
