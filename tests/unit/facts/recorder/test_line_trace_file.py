"""The file of the last lines, as it lies there after any kind of end."""

from __future__ import annotations

import gc
import itertools
import json
import struct
from dataclasses import asdict
from pathlib import Path

import pytest

from distdiag.facts.recorder import line_trace_file
from distdiag.training.line_trace import recorder

THREADS, LINES = 2, 4
ABOUT = line_trace_file.About(
    host="node1",
    boot="b",
    pid=7,
    parent=1,
    ancestors=(),
    started=5,
    began_s=1e9,
    monotonic_s=0.5,
    rings=THREADS,
    lines=LINES,
    rank=3,
    world_size=4,
    launcher="torchrun",
    job={},
    error="",
    raised_at=(),
)


def place(code: int, line: int) -> float:
    return float((code << line_trace_file.LINE_BITS) + line)


def write(folder: Path, blocks: list[tuple[float, ...]], *, names: str = '[1, "/a/train.py", "step", "user"]\n') -> str:
    """Lay a file of one thread down as a process leaves it: (time, place, place...) in the order of the blocks."""
    data = bytearray(line_trace_file.size_of(THREADS, LINES))
    text = json.dumps(asdict(ABOUT)).encode()
    data[:12] = line_trace_file.MAGIC + struct.pack("<I", len(text))
    data[12 : 12 + len(text)] = text
    line_trace_file.THREAD.pack_into(data, line_trace_file.PAGE, 7, line_trace_file.LIVE, 1.0, 0.0, b"MainThread")
    for number, block in enumerate(blocks):
        begin = line_trace_file.ring_offset(THREADS, LINES, 0) + line_trace_file.BLOCK_BYTES * number
        struct.pack_into(f"<{len(block)}d", data, begin, *block)
    path = folder / "x.lines"
    path.write_bytes(data)
    (folder / "x.names").write_text(names)
    return str(path)


def lines(path: str) -> list[int]:
    (thread,) = line_trace_file.read(path).threads
    return [record.line for record in thread.records]


def test_a_ring_that_is_not_full_is_read_from_its_first_block(tmp_path: Path) -> None:
    path = write(tmp_path, [(1.0, place(1, 10)), (2.0, place(1, 11), place(1, 12))])
    (thread,) = line_trace_file.read(path).threads
    assert (thread.tid, thread.name, thread.ended_s) == (7, "MainThread", None)
    assert thread.records[0] == line_trace_file.Record(
        1.0, line_trace_file.Code("/a/train.py", "step", "user"), 10, False
    )
    assert [(record.at_s, record.line) for record in thread.records[1:]] == [(2.0, 11), (2.0, 12)]


def test_a_ring_that_went_round_begins_behind_its_newest_block(tmp_path: Path) -> None:
    path = write(tmp_path, [(5.0, place(1, 14)), (2.0, place(1, 11)), (3.0, place(1, 12)), (4.0, place(1, 13))])
    assert lines(path) == [11, 12, 13, 14]


def test_not_more_lines_are_given_than_were_asked_for(tmp_path: Path) -> None:
    full = tuple(place(1, line) for line in range(10, 18))
    assert lines(write(tmp_path, [(1.0, *full), (2.0, place(1, 20))])) == [15, 16, 17, 20]


def test_a_block_that_was_only_begun_says_nothing(tmp_path: Path) -> None:
    # Cleared, or with its time: the process ended before it wrote the line.
    path = write(tmp_path, [(1.0, place(1, 10)), (0.0,), (7.0,)])
    assert lines(path) == [10]


def test_a_return_to_a_line_is_told_from_its_beginning(tmp_path: Path) -> None:
    path = write(tmp_path, [(1.0, place(1, 10), -place(1, 10))])
    (thread,) = line_trace_file.read(path).threads
    assert [record.back for record in thread.records] == [False, True]


def test_names_that_are_cut_off_or_gone_cost_the_name_alone(tmp_path: Path) -> None:
    path = write(tmp_path, [(1.0, place(2, 10))], names='[1, "/a", "f", "user"]\n[2, "/b.py", "g')
    (thread,) = line_trace_file.read(path).threads
    assert (thread.records[0].line, thread.records[0].code.function) == (10, "?")
    (tmp_path / "x.names").unlink()
    assert lines(path) == [10]


@pytest.mark.parametrize("size", [0, 100, line_trace_file.PAGE, line_trace_file.size_of(THREADS, LINES) - 1])
def test_a_file_that_is_cut_off_is_no_ring(tmp_path: Path, size: int) -> None:
    path = Path(write(tmp_path, []))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(line_trace_file.NotARing):
        line_trace_file.read(str(path))


@pytest.mark.parametrize(
    "about", [b"{}", b"not json", b'{"threads": -1, "lines": 4}', b'{"threads": 2, "lines": 99999999999}']
)
def test_a_description_that_makes_no_sense_is_no_ring(tmp_path: Path, about: bytes) -> None:
    path = Path(write(tmp_path, []))
    data = bytearray(path.read_bytes())
    data[8 : 12 + len(about)] = struct.pack("<I", len(about)) + about
    path.write_bytes(data)
    with pytest.raises(line_trace_file.NotARing):
        line_trace_file.read(str(path))


def test_a_thread_that_ends_early_takes_little_of_its_ring() -> None:
    ring = memoryview(bytearray(10_000 * line_trace_file.BLOCK_BYTES)).cast("d")
    before = sum(type(one) is memoryview for one in gc.get_objects())
    places = itertools.chain.from_iterable(recorder._turns(ring))
    for number in range(100):
        next(places)[0] = float(number)
    assert sum(type(one) is memoryview for one in gc.get_objects()) - before < 200 * (1 + line_trace_file.PLACES)
    for number in range(10_000 * line_trace_file.PLACES):
        next(places)[0] = float(number)
    assert all(ring[:: 1 + line_trace_file.PLACES])
