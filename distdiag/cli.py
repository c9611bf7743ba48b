"""The whole program on one page: one line for each subcommand."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO, cast

import typer

from distdiag.commands.allreduce_bench.command import allreduce_bench
from distdiag.commands.core_bt.command import core_bt
from distdiag.commands.cuda_env.command import cuda_env
from distdiag.commands.floatcmp.command import floatcmp
from distdiag.commands.gpu_test.command import gpu_test
from distdiag.commands.ports.command import ports
from distdiag.commands.pyspy_all.command import pyspy_all
from distdiag.commands.trace.app import app as trace
from distdiag.errors import Interrupted

if TYPE_CHECKING:
    from types import FrameType

app = typer.Typer(
    name="distdiag",
    help="Find which rank, GPU, link or setting makes a distributed PyTorch job slow, hang or fail, and the fix.",
    no_args_is_help=True,
    # Plain text: it pastes, reads the same in a pipe, and spares every TAB the import of rich.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.command("gpu-test", short_help="Can all ranks talk, reduce correctly and use their memory?")(gpu_test)
app.command("allreduce-bench", short_help="How fast are the collectives, is that good, and which rank is late?")(
    allreduce_bench
)
app.command(
    "pyspy-all", short_help="Where does every rank of a hung job stand, and which one is not where the others are?"
)(pyspy_all)
app.add_typer(trace)
app.command("core-bt", short_help="What crashed, in which thread, in Python and in C, and why?")(core_bt)
app.command("ports", short_help="Can the nodes reach each other, on which interface, both ways?")(ports)
app.command("cuda-env", short_help="Why does CUDA not run or build here, and what mends it?")(cuda_env)
app.command("floatcmp", short_help="Are two files of tensors the same but for rounding, and where do they part?")(
    floatcmp
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"distdiag {metadata.version('distdiag')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


class _Tee:
    """stderr that remembers what typer says about a wrong command line, and bears a stderr that cannot be written."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.heard = ""

    def write(self, text: str) -> int:
        self.heard = (self.heard + text)[-4000:]
        with contextlib.suppress(OSError):
            if self.stream is not None:
                self.stream.write(text)
                self.stream.flush()
        return len(text)

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream if self.stream is not None else sys.__stdout__, name)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # What is left to do takes a few seconds at most; a second Ctrl-C would only lose the report.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Run distdiag; however it ends, a program that asked for JSON gets a document and the right exit status."""
    # SIGTERM counts as Ctrl-C: a scheduler that ends us gets what is known by then.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    tee = _Tee(sys.stderr)
    sys.stderr = cast("TextIO", tee)
    try:
        app()
    except SystemExit as end:
        if end.code == Interrupted.exit_code and not _has_spoken():
            # Typer took the Ctrl-C for itself, before any command had begun.
            _end_without_report(Interrupted.exit_code, Interrupted.id, str(Interrupted()))
        if end.code == 2 and "--json" in sys.argv and "Error: " in tee.heard:
            _end_without_report(2, "usage", tee.heard.rpartition("Error: ")[2].strip())
        raise
    except KeyboardInterrupt:
        _end_without_report(Interrupted.exit_code, Interrupted.id, str(Interrupted()))
    except Exception as bug:  # noqa: BLE001 - the last boundary: status 1 would say that a fault of the job was found
        import traceback

        traceback.print_exc()
        _end_without_report(3, "distdiag.bug", f"this is a bug of distdiag: {type(bug).__name__}: {bug}")


def _has_spoken() -> bool:
    deliver = sys.modules.get("distdiag.deliver")
    return deliver is not None and deliver.has_spoken()


def _end_without_report(code: int, id_: str, message: str) -> NoReturn:
    if "--json" in sys.argv:
        from distdiag import deliver

        command = _command_of(sys.argv[1:])
        hint = f"distdiag {command} --help" if command else "distdiag --help"
        deliver.emit(deliver.error_document(command, code, id_, message, hint))
    sys.exit(code)


def _command_of(words: list[str]) -> str:
    """Find the command in what was typed: "pyspy-all", "trace blocked"; empty if there is none."""
    known = ["trace", *(command.name for command in app.registered_commands)]
    at = next((number for number, word in enumerate(words) if word in known), None)
    if at is None or words[at] != "trace":
        return "" if at is None else words[at]
    below = [command.name for command in trace.registered_commands]
    return " ".join(["trace", *[word for word in words[at + 1 :] if word in below][:1]])
