"""Keeps what was seen in files, and judges such files: our own, or those that people have of py-spy."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - this module is only imported when files are kept or read

from distdiag.deliver import Progress, document
from distdiag.errors import UsageError
from distdiag.files import as_text, make_folder, named_files, write_for_host, write_whole
from distdiag.jobs.collect import Processes
from distdiag.jobs.nodes import NodeStacks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.pyspy_all.model import Request
    from distdiag.commands.pyspy_all.result import PySpyAll
    from distdiag.report import Report

_SCHEMA = "distdiag-stacks/1"
_MAX_BYTES = 2 * 2**30


class Saved(msgspec.Struct, frozen=True):
    """One host's file."""

    schema: str
    samples: int
    interval_s: float
    node: NodeStacks


@dataclass(frozen=True, kw_only=True)
class Files:
    """What is to be written and read; empty: nothing."""

    save: str = ""
    saved: tuple[str, ...] = ()
    html: str = ""


def answer(request: Request, files: Files, *, strict: bool) -> Report[PySpyAll]:
    """Look at the job, or judge what was saved, and write what is wanted.

    Raises:
        UsageError: the options contradict each other, or a file cannot be read or written.
        DistdiagError: a file could not be written.
    """
    if files.saved and (files.save or request.cluster.typed()):
        raise UsageError("--from judges saved dumps", hint="leave out --save and the hosts")
    if files.html:
        _check_place(files.html)
    report = judge_saved(request, files.saved) if files.saved else _look_and_save(request, files.save)
    if files.html:
        write_page(report, files.html, strict=strict)
    return report


def _look_and_save(request: Request, folder: str) -> Report[PySpyAll]:
    from distdiag.commands.pyspy_all.check import check

    if folder:
        make_folder("--save", folder)
    with Progress() as progress:
        report, nodes = check(request, progress)
    if folder:
        for node in nodes:
            saved = Saved(_SCHEMA, request.samples, request.interval_s, node)
            write_for_host(folder, node.host, msgspec.json.encode(saved))
    return report


def judge_saved(request: Request, paths: Sequence[str]) -> Report[PySpyAll]:
    """Judge files, or all files of folders.

    Raises:
        UsageError: a path is not there, or holds nothing that we can read.
    """
    from distdiag.commands.pyspy_all.diagnose import diagnose

    # Hundreds of thousands of small objects that all stay: the collector would walk them again and again.
    gc.disable()
    try:
        nodes, samples, interval_s = _read_all(paths)
        return diagnose(replace(request, samples=samples, interval_s=interval_s), nodes)
    finally:
        gc.enable()


def _check_place(path: str) -> None:
    """See beforehand whether a file can be written: a look at the job is not to be lost for that. Raises UsageError."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UsageError(f"--html {path}: this file cannot be written", hint="name a place that can be written")


def write_page(report: Report[PySpyAll], path: str, *, strict: bool) -> None:
    """Write the report as one page for a browser."""
    from distdiag.commands.pyspy_all.page import make_page

    write_whole(path, make_page(document(report, strict=strict)).encode())


def _read_all(paths: Sequence[str]) -> tuple[list[NodeStacks], int, float]:
    from distdiag.commands.pyspy_all import dumps

    nodes: list[NodeStacks] = []
    texts: list[dumps.Dump] = []
    samples, interval_s = 1, 0.0
    for path in named_files(paths):
        data = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else b""
        if data.startswith(b'{"schema":"' + _SCHEMA.encode()):
            try:
                saved = msgspec.json.decode(data, type=Saved)
            except msgspec.DecodeError as error:
                nothing = Processes(path.stem, -1, None, may_trace=False, processes=(), asked_missing=())
                nodes.append(NodeStacks(path.stem, nothing, (), f"{path.name} is not whole: {error}"))
                continue
            nodes.append(saved.node)
            samples, interval_s = saved.samples, saved.interval_s
        else:
            texts += dumps.parse(as_text(data), path.name)
    if texts:
        nodes += dumps.as_nodes(texts)
    if not nodes:
        raise UsageError(
            f"there is no dump in {', '.join(paths)}",
            hint="it takes what --save wrote, and the text or --json of `py-spy dump`",
        )
    return nodes, samples, interval_s
