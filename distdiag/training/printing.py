"""print() for many ranks: no rank's line is torn by another's."""

from __future__ import annotations

import io
import os
import select
import sys
from io import TextIOWrapper

from distdiag.training.host_lock import HostLock
from distdiag.training.whoami import label, torch_distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

_lock = HostLock()


class _Label:
    """`[node07:3] `, asked for again until the process group is there to tell; then it is kept."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._text = ""
        self._final = False

    def text(self) -> str:
        if self._final or (self._text and "torch.distributed" not in sys.modules):
            return self._text
        self._final = torch_distributed() is not None
        if self._final or not self._text:
            self._text = label() + " "
        return self._text


_label = _Label()


def printflock(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: IO[Any] | None = None,
    flush: bool = True,
    prefix: bool = True,
) -> None:
    """Print as print() does, with `[host:rank] ` before each line, and never into the line of another rank.

    The text is written whole and at once, under a lock of all ranks of the job on this host. If the holder of the lock
    writes nothing for 5 s (a rank that was stopped), it is said once on stderr and printed without the lock.

    Args:
        values: as for print().
        sep: as for print().
        end: as for print().
        file: text or binary, with a descriptor or without one; default: sys.stdout.
        flush: for calls that were written for print(); it is flushed always.
        prefix: False to leave out `[host:rank] `.

    Raises:
        ValueError: the file is closed, as from print().
        OSError: it cannot be written to, as from print(); BrokenPipeError if nobody reads it any more.
    """
    stream = sys.stdout if file is None else file
    if stream is None:  # as under pythonw, or with a closed descriptor 1: print() is silent then
        return
    text = (" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end)
    if prefix:
        text = _with_label(text)
    taken = _lock.take()
    try:
        if type(stream) is not TextIOWrapper or not _is_the_process_s_own(stream):
            _write_to_object(stream, text)
            return
        stream.flush()  # what print() left there was said before
        data = text.encode(stream.encoding, stream.errors or "strict")
        written = _write_some(stream.fileno(), data)
        if written < len(data):
            _write_rest(stream.fileno(), memoryview(data)[written:])
    finally:
        _lock.give(taken)


def _with_label(text: str) -> str:
    label = _label.text()
    if text.find("\n", 0, -1) < 0:
        return label + text
    return label + text[:-1].replace("\n", "\n" + label) + text[-1]


def _is_the_process_s_own(stream: IO[Any]) -> bool:
    # A notebook and loggers put an object of theirs, or a write() of theirs, into this place: they are to see the text.
    return (stream is sys.__stdout__ or stream is sys.__stderr__) and "write" not in stream.__dict__


def _write_to_object(stream: IO[Any], text: str) -> None:
    if isinstance(stream, io.RawIOBase):
        data = text.encode()
        _write_rest(stream.fileno(), memoryview(data))
    else:
        stream.write(text.encode() if isinstance(stream, io.BufferedIOBase) else text)
        stream.flush()


def _write_some(file: int, data: bytes | memoryview) -> int:
    try:
        return os.write(file, data)
    except BlockingIOError:  # somebody made this pipe non-blocking, for all who have it
        return 0


def _write_rest(file: int, rest: memoryview) -> None:
    """Write until all is written: write() of a stream would drop the rest, with python -u, when a signal cuts it."""
    writable = select.poll()
    writable.register(file, select.POLLOUT)
    while rest:
        writable.poll()
        rest = rest[_write_some(file, rest) :]
