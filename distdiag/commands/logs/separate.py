"""Separation of a mixed log by rank: --rank and --split."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import typer

from distdiag.cluster.hosts import name_ranks
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts.logs import collect
from distdiag.facts.logs.demux import Demux, harmless
from distdiag.facts.packed_files import CannotUnpack
from distdiag.files import make_folder
from distdiag.options import parse_ranks
from distdiag.output import fail

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from distdiag.facts.logs.demux import Stream

_MOST_FILES = 512


def deliver_streams(
    paths: Sequence[str], chosen: Sequence[str], split: str, *, has_hosts: bool, as_json: bool
) -> NoReturn:
    """Write the lines of ranks to stdout, or of each rank to a file, and exit."""
    try:
        ranks = parse_ranks(chosen)
        if has_hosts or as_json or not paths:
            raise UsageError(
                "--rank and --split take logs of this machine and write text", hint="name files of this machine"
            )
        if split:
            make_folder("--split", split)
            _split(paths, split, ranks)
        elif not _print(paths, ranks):
            raise DistdiagError(
                f"no line of {name_ranks(ranks)} in {', '.join(paths)}", hint="distdiag logs PATH lists the ranks"
            )
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except DistdiagError as error:
        fail("logs", error, as_json=as_json)
    raise typer.Exit(0)


def _print(paths: Sequence[str], ranks: Collection[int]) -> bool:
    out, found = sys.stdout.buffer, False
    on_terminal = sys.stdout.isatty()
    for line in (text for number, _, text in _lines(paths) if number in ranks):
        found = True
        out.write(harmless(line) if on_terminal else line)
    out.flush()
    return found


def _split(paths: Sequence[str], folder: str, only: Collection[int]) -> None:
    files: dict[str, BinaryIO] = {}
    try:
        for rank, label, text in _lines(paths):
            if only and rank not in only:
                continue
            name = f"rank{rank}.log" if rank is not None else f"{_safe(label)}.log"
            if name not in files:
                if len(files) >= _MOST_FILES:
                    name = "others.log"
                files.setdefault(name, open(os.path.join(folder, name), "wb"))  # noqa: SIM115 - closed below
            files[name].write(text)
    except OSError as error:
        raise DistdiagError(f"--split {folder}: {error.strerror}", hint="name a folder that can be written") from error
    finally:
        for file in files.values():
            file.close()


def _safe(label: str) -> str:
    text = "".join(char if char.isalnum() or char in "-_." else "_" for char in label).strip("_.")
    return text[:100] or "launcher"


def _lines(paths: Sequence[str]) -> Iterator[tuple[int | None, str, bytes]]:
    """Yield (rank, label, line) of all logs; a progress bar is its last state."""
    for path in paths:
        for name, error in collect.files_of(path):
            if error:
                raise DistdiagError(f"{name}: {error}", hint="name logs that can be read")
            yield from _lines_of(name)


def _lines_of(path: str) -> Iterator[tuple[int | None, str, bytes]]:
    demux, own = Demux(), collect.of_path(path)
    try:
        for block in collect.blocks(path, [0]):
            demux.detect(block)
            lines = block.split(b"\n")
            for number, line in enumerate(lines):
                ended = number < len(lines) - 1
                for label, text in demux.lines(line, ended) if line or ended else ():
                    yield _named(demux.labels[label], own.rank, own.local, text + b"\n" * ended)
        for label, text in demux.finish():
            yield _named(demux.labels[label], own.rank, own.local, text)
    except (collect.Unreadable, CannotUnpack, OSError, ValueError) as error:
        raise DistdiagError(f"{path}: {error}", hint="name logs that can be read") from error


def _named(stream: Stream, rank: int | None, local: int | None, text: bytes) -> tuple[int | None, str, bytes]:
    number = next((known for known in (stream.rank, stream.local, rank, local) if known is not None), None)
    if number is None and (inner := collect.RANK.match(text)):
        number = int(inner[1])
    if b"\r" in text:
        ended = text.endswith(b"\n")
        states = [state for state in text.rstrip(b"\n").split(b"\r") if state.strip()]
        text = (states[-1] if states else b"") + b"\n" * ended
    return number, f"{stream.host}{stream.label}", text
