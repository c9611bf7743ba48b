"""The facts of one run from all hosts: written by --save DIR, a file per host, and read again by --from.

A file holds the request and a host's facts, or why it has none. A folder of such files, or files sent by several
people, suffice to reproduce the report on another machine.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec  # noqa: TID253 - this module is only imported when there are facts to gather or to read

from distdiag import __version__
from distdiag.bundle_file import is_bundle, saved_facts
from distdiag.cluster.checked_json import InvalidData, read_json
from distdiag.cluster.host_results import HostError, HostResult  # noqa: TC001 - msgspec reads the annotations
from distdiag.cluster.pods import Pod  # noqa: TC001
from distdiag.errors import UsageError
from distdiag.facts.text import printable
from distdiag.files import named_files, write_whole
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

Asked = TypeVar("Asked")
Facts = TypeVar("Facts")
_SCHEMA = "distdiag-facts/1"
_MOST_BYTES = 256 * 2**20
_PY_SPY = re.compile(rb"\s*Process \d+: .*\n(?:Python v\d|\s*\n\s*Thread )")
"""Beginning of the text of `py-spy dump`, which pyspy-all reads."""
_MOST_REASONS = 3
_MOST_OTHERS = 6
_ONE_RUN_S = 3600.0
"""Files of one folder within this time belong to one run, or to runs started by hand on each node."""


@dataclass(kw_only=True)
class Gathered(Generic[Facts]):
    """Facts received from the hosts, in the order of the hosts; each has a `host`.

    `missing`: by host, why facts are missing or incomplete. `rows` and `refusals`: the outcome for each requested host;
    a run on this machine alone has no rows.
    """

    facts: list[Facts] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    rows: tuple[HostResult, ...] = ()
    refusals: dict[str, HostError] = field(default_factory=dict)
    interrupted: bool = False
    pods: tuple[Pod, ...] = ()
    """State in Kubernetes of pods among the hosts. `pods_error`: why the final query failed."""
    pods_error: str = ""


class _Head(msgspec.Struct, frozen=True):
    schema: str
    command: str


class _Saved(msgspec.Struct, Generic[Asked, Facts], frozen=True, kw_only=True):
    """One host's file. `number`: position of the host; `at`: time of saving, in seconds since 1970."""

    schema: str = _SCHEMA
    command: str
    version: str = __version__
    at: float = 0.0
    number: int
    host: str
    request: Asked
    interrupted: bool = False
    missing: str = ""
    row: HostResult | None = None
    refusal: HostError | None = None
    facts: Facts | None = None
    pod: Pod | None = None


@record
class Foreign(Generic[Facts]):
    """How to convert another tool's files to facts: parse each (may raise InvalidData), then combine all."""

    parse: Callable[[bytes, Path], list[Any]]
    combine: Callable[[list[Any]], list[Facts]]
    request: Callable[[Any], Any]
    """Derives the request from the typed request, as far as such files show it."""


def save(folder: str, command: str, request: object, gathered: Gathered[Any]) -> None:
    """Write a file for each host, omitting values of variables (--env NAME=VALUE). Raises DistdiagError."""
    for name, host_file in documents(command, request, gathered):
        write_whole(os.path.join(folder, name), host_file)


def documents(command: str, request: object, gathered: Gathered[Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the --save files (file name, content), one per host."""
    facts = {of_host.host: of_host for of_host in gathered.facts}
    rows = {row.host: row for row in gathered.rows}
    pods = {pod.name: pod for pod in gathered.pods}
    names: set[str] = set()
    at = time.time()
    for number, host in enumerate(dict.fromkeys([*rows, *facts, *gathered.refusals, *gathered.missing, *pods])):
        saved = _Saved(
            command=command,
            at=at,
            number=number,
            host=host,
            request=_without_values(request),
            interrupted=gathered.interrupted,
            missing=gathered.missing.get(host, ""),
            row=rows.get(host),
            refusal=gathered.refusals.get(host),
            facts=facts.get(host),
            pod=pods.get(host),
        )
        name = re.sub(r"[^\w.-]", "_", f"{command}.{host}")[:200]
        name = f"{name}.{number}" if name in names else name
        names.add(name)
        yield f"{name}.json", msgspec.json.encode(saved)


def _without_values(request: Any) -> Any:  # noqa: ANN401 - each command has a type of its own
    """Keep only the names of variables typed for the hosts: the values may be secrets."""
    names = tuple(variable.partition("=")[0] for variable in request.cluster.env)
    return replace(request, cluster=replace(request.cluster, env=names))


def are_facts(paths: Sequence[str]) -> bool:
    """Return whether any of these files, or files in these folders, was written by --save or bundle."""
    there = [path for path in paths if path and (os.path.isdir(path) or os.path.isfile(path))]
    begin = b'{"schema":"' + _SCHEMA.encode()
    return any(_begins(path).startswith(begin) or is_bundle(path) for path in named_files(there))


def _begins(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(100)
    except OSError:
        return b""


def read(
    paths: Sequence[str],
    command: str,
    types: tuple[type[Asked], type[Facts]],
    foreign: Foreign[Facts] | None = None,
) -> tuple[Asked | None, Gathered[Facts]]:
    """Read files written by --save; of several runs, return the first request.

    An unreadable file counts as a host that did not answer, if it was named or has the suffix of readable files.
    Facts of other commands are skipped. `types`: of the request, and of the facts of one host. Raises UsageError.
    """
    reader = _Reader(command, types, foreign)
    files = [(name, path) for name in paths for path in named_files([name])]
    gc.disable()  # hundreds of thousands of small long-lived objects, which the collector would scan repeatedly
    try:
        for name, path in {path.resolve(): (name, path) for name, path in files}.values():
            reader.take(path, named=str(path) == name)
    finally:
        gc.enable()
    return reader.result(paths)


def decode(
    files: Iterable[tuple[Path, bytes]], command: str, types: tuple[type[Asked], type[Facts]]
) -> tuple[Asked | None, Gathered[Facts]]:
    """Read --save files from memory: (name, content). Raises UsageError if none is readable."""
    reader = _Reader(command, types, None)
    for path, data in files:
        reader.take_content(path, lambda data=data: data, named=True)  # type: ignore[misc]
    return reader.result(["these files"])


class _Reader(Generic[Asked, Facts]):
    def __init__(
        self,
        command: str,
        types: tuple[type[Asked], type[Facts]],
        foreign: Foreign[Facts] | None,
    ) -> None:
        self._command, self._foreign = command, foreign
        # The type parameters are only known at run time.
        saved: Any = _Saved
        self._type = saved[types]
        self._runs: dict[Path, dict[Path, _Saved[Asked, Facts]]] = {}
        self._foreigners: list[Any] = []
        self._suffixes: set[str] = set()
        self._unread: dict[Path, tuple[str, bool]] = {}
        self._others: set[str] = set()

    def take(self, path: Path, *, named: bool) -> None:
        if not is_bundle(path):
            self.take_content(path, lambda: _load(path), named=named)
            return
        try:
            for name, data in saved_facts(path):
                self.take_content(path / name, lambda data=data: data, named=named)  # type: ignore[misc]
        except InvalidData as error:
            self._unread[path] = (str(error), True)

    def take_content(self, path: Path, load: Callable[[], bytes], *, named: bool) -> None:
        data = b""
        try:
            data = load()
            if not named and _is_report(data):
                return
            if self._foreign is not None and b'"schema":"distdiag-' not in data[:60]:
                self._foreigners += self._foreign.parse(data, path)
            else:
                head = _head(data)
                if head.command != self._command:
                    self._others.add(head.command)
                    return
                self._runs.setdefault(path.parent, {})[path] = _decode(data, self._type)
        except InvalidData as error:
            is_dump = _PY_SPY.match(data) is not None
            self._others |= {"pyspy-all"} if is_dump else set()
            self._unread[path] = ("is a dump of py-spy" if is_dump else str(error), named)
        else:
            self._suffixes.add(path.suffix)

    def result(self, paths: Sequence[str]) -> tuple[Asked | None, Gathered[Facts]]:
        gathered = Gathered[Facts]()
        request: Asked | None = None
        for run in self._runs.values():
            newest = max(saved.at for saved in run.values())
            for path, saved in sorted(run.items(), key=lambda item: item[1].number):
                if saved.at < newest - _ONE_RUN_S:
                    gathered.missing[path.name] = f"{path} is left out: it is from an earlier run than the other files"
                    continue
                request = request or saved.request
                _add(gathered, saved)
        if self._foreign is not None and self._foreigners:
            gathered.facts += self._foreign.combine(self._foreigners)
        if not gathered.facts and not gathered.rows and not gathered.refusals:
            raise self._nothing(paths)
        for path, (why, named) in self._unread.items():
            # Ignore unrelated files in a folder; report unreadable files with the suffix of readable ones.
            if named or path.suffix in self._suffixes:
                gathered.missing[path.name] = f"{path} {why}"
        return request, gathered

    def _nothing(self, paths: Sequence[str]) -> UsageError:
        reasons = [f"{path.name} {why}" for path, (why, _) in self._unread.items()][:_MOST_REASONS]
        more = f" ({'; '.join(reasons)})" if reasons else ""
        where = " ".join(map(shlex.quote, paths))
        others = [f"distdiag {printable(name[:40])} --from {where}" for name in sorted(self._others)][:_MOST_OTHERS]
        hint = f"what is there is read by {' or '.join(others)}" if others else ""
        takes = ", or files of other tools that it reads" if self._foreign is not None else ""
        return UsageError(
            f"no facts from {self._command} in {', '.join(paths)}{more}",
            hint=hint or f"give what {self._command} --save wrote{takes}",
        )


def _add(gathered: Gathered[Facts], saved: _Saved[Any, Facts]) -> None:
    gathered.interrupted |= saved.interrupted
    gathered.rows += (saved.row,) if saved.row is not None else ()
    if saved.refusal is not None:
        gathered.refusals[saved.host] = saved.refusal
    if saved.missing:
        gathered.missing[saved.host] = saved.missing
    gathered.pods += (saved.pod,) if saved.pod is not None else ()
    if saved.facts is not None:
        gathered.facts.append(saved.facts)


def _is_report(data: bytes) -> bool:
    """Return whether a file is a --json report, which commands write next to the facts."""
    return re.match(rb'\s*\{\s*"schema":\s*"distdiag/\d', data[:60]) is not None


def _load(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidData(f"is larger than {_MOST_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise InvalidData(f"cannot be read: {error.strerror}") from error


def _head(data: bytes) -> _Head:
    head: _Head = _decode(data, _Head)
    if head.schema != _SCHEMA:
        raise InvalidData(f"is from {printable(head.schema[:40])}, not {_SCHEMA}")
    return head


def _decode(data: bytes, type_: type[Any]) -> Any:  # noqa: ANN401 - what was asked for
    try:
        return read_json(data, type_)
    except InvalidData as error:
        raise InvalidData(f"was not written by --save: {error}") from error
