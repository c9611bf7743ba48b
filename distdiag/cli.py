"""The whole program on one page: one line for each subcommand."""

from __future__ import annotations

import sys
from typing import Annotated, TextIO, cast

import typer

from distdiag.commands.gpu_test.command import gpu_test

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
    """stderr that remembers what typer says about a wrong command line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.heard = ""

    def write(self, text: str) -> int:
        self.heard = (self.heard + text)[-4000:]
        return self.stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def main() -> None:
    """Run distdiag. With --json a wrong command line is answered in JSON too."""
    if "--json" not in sys.argv or sys.stderr is None:
        app()
        return
    tee = _Tee(sys.stderr)
    sys.stderr = cast("TextIO", tee)
    try:
        app()
    except SystemExit as end:
        if end.code == 2 and "Error: " in tee.heard:
            from distdiag import deliver

            message = tee.heard.rpartition("Error: ")[2].strip()
            command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
            deliver.emit(deliver.error_document(command, 2, "usage", message, f"distdiag {command} --help"))
        raise
