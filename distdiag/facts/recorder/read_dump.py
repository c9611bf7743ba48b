"""Parses one flight recorder dump: PyTorch's pickle (NCCL, XCCL, Gloo) or JSON.

A dump is untrusted. The unpickler builds containers, text and numbers; any import or call is refused. Entries become
columns of numbers: a thousand ranks with thousands of entries are ordinary.
"""

from __future__ import annotations

import array
import base64
import io
import json
import pickle
import re
import sys
import zlib

from distdiag.facts.text import fold
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    Json = dict[str, Any]
    """A dump or an entry as unpickled, written by any version of torch or by anyone: checked field by field."""

COLUMNS = ("group", "operation", "site", "seq", "p2p_seq", "record", "state", "created_ns", "completed_ns")
SCHEDULED, STARTED, ENDED, FAILED = 0, 1, 2, 3
"""`state` of an entry. Gloo marks failed operations like ended operations."""
MOST_ENTRIES = 1_000_000
_MOST_SIZES = 4096
_WATCH_THE_DEVICE = ("nccl", "xccl")
_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": ENDED}
_P2P = re.compile(r"(send|recv) (\d{1,7}) ?(?:->|<-) ?(\d{1,7})")
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/torch/|/torch/(?:distributed|nn|autograd|utils|_dynamo)/|^<|/contextlib\.py$"
)
_MOST_RANKS = 2**20
_BIG = 2**63

_Sizes = tuple[tuple[int, ...], ...]
Operation = tuple[str, str, _Sizes, _Sizes, tuple[str, ...], tuple[str, ...], int, int]
"""(operation, backend, input sizes, output sizes, input types, output types, source, target).

Source and target are those of a send or recv, as numbers in the group; else -1.
"""


@record
class Dump:
    """One dump. `entries` are packed, see `pack`; `groups`: (name, description, ranks folded).

    `rank`: None if unknown; `candidates`: the possible ranks, folded. `status`: (group, last enqueued,
    last completed). `modified_s`: of the file. `unreadable`: number of entries damaged
    or in an unknown form.
    """

    form: str
    backends: tuple[str, ...]
    version: str
    rank: int | None
    world_size: int
    groups: tuple[tuple[str, str, str], ...]
    operations: tuple[Operation, ...]
    count: int
    entries: str
    unreadable: int
    path: str = ""
    modified_s: float = 0.0
    candidates: str = ""
    host: str = ""
    error: str = ""
    dumped_s: float = 0.0
    truncated: bool = False
    p2p_groups: tuple[str, ...] = ()
    status: tuple[tuple[str, int, int], ...] = ()
    sites: tuple[tuple[str, str, int], ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether entries are missing, so that the absence of a call proves nothing."""
        return self.truncated or self.unreadable > 0


class Unreadable(Exception):
    """Not a readable dump. `truncated`: it starts like one; `is_code`: it would run code."""

    def __init__(self, why: str, *, truncated: bool = False, is_code: bool = False) -> None:
        super().__init__(why)
        self.truncated, self.is_code = truncated, is_code


class NotADump(Exception):
    """It does not even start like a dump."""


def read(data: bytes) -> Dump:
    """Read a dump; `path` and `modified_s` are left to the caller. Raises Unreadable, NotADump."""
    head = data[:64].lstrip()
    if not data:
        raise Unreadable("empty file", truncated=True)
    if head.startswith(b"{") and not head.startswith(b"}q"):
        return _of_document(_json(data), "json", truncated=False)
    if data[:1] in (b"\x80", b"(", b"c", b"}", b"]"):
        document, truncated = _unpickle(data)
        return _of_document(document, "pickle", truncated=truncated)
    raise NotADump


def pack(columns: Sequence[array.array[int]]) -> str:
    """Pack the columns of entries into text."""
    for column in columns:
        if sys.byteorder == "big":
            column.byteswap()
    return base64.b64encode(zlib.compress(b"".join(column.tobytes() for column in columns), 1)).decode()


def unpack(text: str, count: int) -> list[array.array[int]]:
    """Reverse `pack`. Raises ValueError."""
    wanted = count * 8 * len(COLUMNS)
    if not 0 <= count <= MOST_ENTRIES:
        raise ValueError(f"{count} entries")
    try:
        stream = zlib.decompressobj()
        raw = stream.decompress(base64.b64decode(text, validate=True), wanted + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(raw) != wanted:
        raise ValueError("the entries are not as many as they should be")
    columns = []
    for start in range(0, wanted, count * 8) if count else [0] * len(COLUMNS):
        column = array.array("q")
        column.frombytes(raw[start : start + count * 8])
        if sys.byteorder == "big":
            column.byteswap()
        columns.append(column)
    return columns


def _json(data: bytes) -> Any:  # noqa: ANN401 - any JSON
    try:
        return json.loads(data)
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"incomplete JSON: {str(error)[:100]}", truncated=True) from None


class _NoCode:
    def find_class(self, module: str, name: str) -> NoReturn:
        shown = f"{module}.{name}"[:200]
        raise Unreadable(f"it would run code: {shown}", is_code=True)

    def persistent_load(self, pid: object) -> NoReturn:
        raise Unreadable("it refers to objects outside the file")


class _Plain(_NoCode, pickle.Unpickler):
    pass


class _PartialUnpickler(_NoCode, pickle._Unpickler):  # the Python implementation exposes its stack
    pass


def _unpickle(data: bytes) -> tuple[Any, bool]:
    try:
        return _Plain(io.BytesIO(data)).load(), False
    except Unreadable:
        raise
    except (EOFError, pickle.UnpicklingError) as error:
        if isinstance(error, EOFError) or "truncated" in str(error) or "exhausted" in str(error):
            return _salvaged(data), True
        raise Unreadable(f"not a readable pickle: {str(error)[:100]}", truncated=data[:1] == b"\x80") from None
    except Exception as error:  # noqa: BLE001 - bytes that are no pickle raise anything
        raise Unreadable(f"not a readable pickle: {type(error).__name__}") from None


def _salvaged(data: bytes) -> dict[Any, Any]:
    """Return the contents of a truncated pickle: a dictionary up to its last complete entry."""
    reader = _PartialUnpickler(io.BytesIO(data))
    try:
        reader.load()
    except Unreadable:
        raise
    except Exception:  # noqa: BLE001 - that it ends in the middle is known
        pass
    levels: list[list[Any]] = [*getattr(reader, "metastack", []), getattr(reader, "stack", [])]
    found = levels[0][0] if levels and levels[0] else None
    if not isinstance(found, dict):
        raise Unreadable("truncated before the first entry", truncated=True)
    for level in levels[1:2]:
        found.update({key: value for key, value in zip(level[::2], level[1::2]) if isinstance(key, str)})
    if len(levels) > 2 and isinstance(found.get("entries"), list):
        found["entries"] = [*found["entries"], *(entry for entry in levels[2] if isinstance(entry, dict) and entry)]
    if not found:
        raise Unreadable("truncated before the first entry", truncated=True)
    return found


def _whole(value: object, default: int = -1) -> int:
    if type(value) is int:
        return value if -_BIG <= value < _BIG else default
    if isinstance(value, str) and 0 < len(value) < 19 and value.lstrip("-").isdigit():
        return int(value)
    return default


def _text(value: object, longest: int = 300) -> str:
    return value[:longest] if isinstance(value, str) else ""


def _numbers(text: object) -> list[int]:
    """Parse ranks: "[0, 1]", or a list."""
    if isinstance(text, str):
        return [int(number) for number in re.findall(r"\d{1,7}", text[:2_000_000])]
    return (
        [number for number in text if type(number) is int and 0 <= number < _MOST_RANKS]
        if isinstance(text, list)
        else []
    )


class _Table:
    """Values by number, each held once."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:  # noqa: ANN401 - whatever is hashable
        return self.numbers.setdefault(value, len(self.numbers))


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    """Validate the sizes of tensors. Raises ValueError."""
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_SIZES:
        raise ValueError
    sizes = []
    for size in value:
        if not isinstance(size, (list, tuple)) or len(size) > 64:
            raise ValueError
        if not all(type(number) is int and -_BIG <= number < _BIG for number in size):
            raise ValueError
        sizes.append(tuple(size))
    return tuple(sizes)


def _dtypes(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(sorted({_text(name, 40) for name in value[:_MOST_SIZES]}))


def _append(columns: Sequence[array.array[int]], row: Sequence[int]) -> None:
    """Append a row to the columns, which stay unchanged on OverflowError or TypeError."""
    for column, value in zip(columns, array.array("q", row)):
        column.append(value)


def _state(entry: Json, backend: str) -> int:
    """Return the state. Only NCCL and XCCL watch the device: entries they retire unfinished timed out or failed.

    Gloo leaves the state at "scheduled", and retires ended operations.
    """
    state = _STATES.get(entry.get("state") or "", SCHEDULED)
    if entry.get("retired") is True and state != ENDED:
        return FAILED if backend in _WATCH_THE_DEVICE else ENDED
    return state


def _of_document(document: Any, form: str, *, truncated: bool) -> Dump:  # noqa: ANN401 - not known yet
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not ("entries" in document or "pg_config" in document):
        raise Unreadable("no flight recorder entries")
    if entries is not None and not isinstance(entries, list):
        raise Unreadable("entries is not a list")
    if len(entries or ()) > MOST_ENTRIES:
        raise Unreadable(f"more than {MOST_ENTRIES} entries")
    return _Document(document, form, truncated=truncated).read(entries or [])


class _Document:
    def __init__(self, document: Json, form: str, *, truncated: bool) -> None:
        self._document, self._form, self._truncated = document, form, truncated
        self._groups, self._operations, self._sites = _Table(), _Table(), _Table()
        self._library: dict[str, bool] = {}
        self._backends: set[str] = set()
        self._names: dict[str, str] = {}
        self._p2p: set[str] = set()
        self._local: dict[str, int] = {}
        self._columns = [array.array("q") for _ in COLUMNS]
        self._unreadable = 0

    def read(self, entries: list[Any]) -> Dump:
        descriptions: dict[str, str] = {}
        coalesced: dict[tuple[int, int, int], list[int]] = {}
        for entry in entries:
            try:
                self._entry(entry, descriptions, coalesced)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                self._unreadable += 1
        version = _text(self._document.get("version"), 40)
        if self._unreadable and not len(self._columns[0]):
            many = f"none of its {self._unreadable} entries can be read"
            raise Unreadable(f"{many} (format {version or 'unknown'}; torch 2.5 and later write 2.x)")
        error = _text(self._document.get("distdiag_error"))
        if error:
            self._fail_last()
        configured = self._configured()
        names = list(self._groups.numbers)
        known = {name: configured.get(name, ("", [])) for name in [*names, *configured]}
        rank, candidates = self._rank(configured)
        return Dump(
            form=self._form,
            backends=tuple(sorted(self._backends)[:8]),
            version=version,
            rank=None if rank < 0 else rank,
            candidates=candidates,
            world_size=min(_MOST_RANKS, max(0, _whole(self._document.get("distdiag_world_size")))),
            host=_text(self._document.get("distdiag_host")),
            error=error,
            dumped_s=max(0, _whole(self._document.get("distdiag_dumped_ns"), 0)) / 1e9,
            truncated=self._truncated,
            unreadable=self._unreadable,
            groups=tuple((name, own[0] or descriptions.get(name, ""), fold(own[1])) for name, own in known.items()),
            p2p_groups=tuple(sorted(self._p2p)),
            status=tuple(self._status(configured)),
            operations=tuple(self._operations.numbers),
            sites=tuple(self._sites.numbers),
            count=len(self._columns[0]),
            entries=pack(self._columns),
        )

    def _entry(
        self, entry: Json, descriptions: dict[str, str], coalesced: dict[tuple[int, int, int], list[int]]
    ) -> None:
        named = entry["process_group"]
        name = named[0]
        if type(name) is not str:
            raise ValueError
        profiling = entry["profiling_name"]
        backend, _, operation = profiling[:300].partition(":")
        self._backends.add(backend[:40])
        if name not in descriptions:
            descriptions[name] = _text(named[1]) if len(named) > 1 else ""
        if "pg_id" in entry:
            self._names.setdefault(str(entry["pg_id"])[:20], name)
        group = self._groups.number(name[:300])
        seq, p2p_seq = _whole(entry["collective_seq_id"]), _whole(entry.get("p2p_seq_id"), 0)
        is_p2p = entry.get("is_p2p") is True
        state = _state(entry, backend)
        if is_p2p or (backend == "gloo" and _whole(entry.get("op_id"), seq) != seq):
            self._p2p.add(name)
        key = (group, seq, p2p_seq)
        if operation == "coalesced":  # a coalesced operation has no state of its own
            for place in coalesced.pop(key, ()) if is_p2p else ():
                self._columns[6][place] = state
            if is_p2p:
                return
        source, target = -1, -1
        if is_p2p:
            operation, source, target = self._pair(name, operation)
        described = self._operations.number(
            (
                operation,
                backend[:40],
                _sizes(entry.get("input_sizes") or ()),
                _sizes(entry.get("output_sizes") or ()),
                _dtypes(entry.get("input_dtypes")),
                _dtypes(entry.get("output_dtypes")),
                source,
                target,
            )
        )
        row = (
            group,
            described,
            self._site(entry.get("frames")),
            seq,
            p2p_seq if is_p2p else -1,
            _whole(entry.get("record_id")),
            state,
            _whole(entry.get("time_created_ns"), 0),
            _whole(entry.get("time_discovered_completed_ns"), 0),
        )
        _append(self._columns, row)
        if is_p2p:
            coalesced.setdefault(key, []).append(len(self._columns[0]) - 1)

    def _pair(self, name: str, operation: str) -> tuple[str, int, int]:
        """Parse "send 1->2" or "recv 2<-1": operation, source, target, as numbers in the group."""
        found = _P2P.search(operation)
        if found is None:
            return operation, -1, -1
        here, there = int(found[2]), int(found[3])
        self._local.setdefault(name, here)
        return (found[1], here, there) if found[1] == "send" else (found[1], there, here)

    def _site(self, frames: Any) -> int:  # noqa: ANN401 - a list of dictionaries, if it is what it should be
        if not isinstance(frames, list):
            return -1
        for frame in frames:
            file = frame["filename"]
            library = self._library.get(file)
            if library is None:
                library = self._library[file] = bool(_LIBRARY.search(file))
            if not library:
                return self._sites.number(
                    (_text(frame.get("name")), _text(file, 1000), max(0, _whole(frame.get("line"))))
                )
        return -1

    def _fail_last(self) -> None:
        """Mark the newest operation as failed: the rank itself reported an error when it wrote the dump."""
        states = self._columns[6]
        if len(states):
            newest = max(range(len(states)), key=lambda place: self._columns[5][place])
            states[newest] = FAILED

    def _configured(self) -> dict[str, tuple[str, list[int]]]:
        found: dict[str, tuple[str, list[int]]] = {}
        configuration = self._document.get("pg_config")
        for key, about in configuration.items() if isinstance(configuration, dict) else ():
            if isinstance(key, str) and isinstance(about, dict) and (ranks := _numbers(about.get("ranks"))):
                found[key[:300]] = (_text(about.get("desc")), ranks)
        return found

    def _rank(self, configured: dict[str, tuple[str, list[int]]]) -> tuple[int, str]:
        """Return the rank, or -1 and the ranks consistent with the groups: it is in all of its groups."""
        rank = _whole(self._document.get("distdiag_rank", self._document.get("rank")))
        if 0 <= rank < _MOST_RANKS:
            return rank, ""
        for name, local in self._local.items():
            ranks = configured.get(name, ("", []))[1]
            if local < len(ranks):
                return ranks[local], ""
        common: set[int] | None = None
        for _, ranks in configured.values():
            common = set(ranks) if common is None else common & set(ranks)
        if common is None:
            return -1, ""
        return (next(iter(common)), "") if len(common) == 1 else (-1, fold(sorted(common)))

    def _status(self, configured: dict[str, tuple[str, list[int]]]) -> list[tuple[str, int, int]]:
        """List (group, last enqueued, last completed); the status is by pg_id, which only entries map to names.

        Even without entries, a rank has created its groups in the order of both lists.
        """
        status = self._document.get("pg_status")
        if not isinstance(status, dict):
            return []
        names = dict(self._names)
        ids = sorted((key for key in status if isinstance(key, str) and key.isdigit() and len(key) < 10), key=int)
        if len(ids) == len(configured) == len(status) and all(name.isdigit() and len(name) < 10 for name in configured):
            by_order = dict(zip(ids, sorted(configured, key=int)))
            if all(by_order.get(key) == name for key, name in names.items()):
                names = by_order
        found = []
        for key in ids:
            about = status[key]
            if key in names and isinstance(about, dict):
                enqueued = _whole(about.get("last_enqueued_collective"))
                found.append((names[key][:300], enqueued, _whole(about.get("last_completed_collective"))))
        return found
