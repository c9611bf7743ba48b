"""The file of the last lines, as it lies there after any kind of end."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from distdiag.node import rings

THREADS, LINES = 2, 4
ABOUT = {"threads": THREADS, "lines": LINES, "pid": 7, "rank": 3}


def place(code: int, line: int) -> float:
    return float((code << rings.LINE_BITS) + line)


def write(
    folder: Path, records: list[tuple[float, float]], *, names: str = '[1, "/a/train.py", "step", "user"]\n'
) -> str:
    """Lay a file of one thread down as a process leaves it: (place, time) in the order of the slots."""
    data = bytearray(rings.size_of(THREADS, LINES))
    text = json.dumps(ABOUT).encode()
    data[:12] = rings.MAGIC + struct.pack("<I", len(text))
    data[12 : 12 + len(text)] = text
    rings.THREAD.pack_into(data, rings.PAGE, 7, rings.LIVE, 1.0, 0.0, b"MainThread")
    for number, record in enumerate(records):
        struct.pack_into("<dd", data, rings.ring_offset(THREADS, LINES, 0) + 16 * number, *record)
    path = folder / "x.lines"
    path.write_bytes(data)
    (folder / "x.names").write_text(names)
    return str(path)


def lines(path: str) -> list[int]:
    (thread,) = rings.read(path).threads
    return [record.line for record in thread.records]


def test_a_ring_that_is_not_full_is_read_from_its_first_record(tmp_path: Path) -> None:
    path = write(tmp_path, [(place(1, 10), 1.0), (place(1, 11), 2.0)])
    (thread,) = rings.read(path).threads
    assert (thread.tid, thread.name, thread.ended_s) == (7, "MainThread", None)
    assert thread.records[1] == rings.Record(2.0, rings.Code("/a/train.py", "step", "user"), 11, False)


def test_a_full_ring_begins_behind_its_newest_record_and_gives_up_the_oldest(tmp_path: Path) -> None:
    path = write(tmp_path, [(place(1, 14), 5.0), (place(1, 11), 2.0), (place(1, 12), 3.0), (place(1, 13), 4.0)])
    assert lines(path) == [12, 13, 14]


def test_a_record_cut_in_the_middle_of_a_full_ring_is_not_taken_for_the_newest_nor_believed(tmp_path: Path) -> None:
    # The place of line 99 is there, and the time is still that of the record it replaces.
    path = write(tmp_path, [(place(1, 14), 5.0), (place(1, 99), 2.0), (place(1, 12), 3.0), (place(1, 13), 4.0)])
    assert lines(path) == [12, 13, 14]


def test_a_first_record_cut_in_the_middle_is_the_last_line(tmp_path: Path) -> None:
    path = write(tmp_path, [(place(1, 10), 1.0), (place(1, 11), 0.0)])
    (thread,) = rings.read(path).threads
    assert [(record.line, record.at_s) for record in thread.records] == [(10, 1.0), (11, None)]


def test_a_return_to_a_line_is_told_from_its_beginning(tmp_path: Path) -> None:
    path = write(tmp_path, [(place(1, 10), 1.0), (-place(1, 10), 2.0)])
    (thread,) = rings.read(path).threads
    assert [record.back for record in thread.records] == [False, True]


def test_names_that_are_cut_off_or_gone_cost_the_name_alone(tmp_path: Path) -> None:
    path = write(tmp_path, [(place(2, 10), 1.0)], names='[1, "/a", "f", "user"]\n[2, "/b.py", "g')
    (thread,) = rings.read(path).threads
    assert (thread.records[0].line, thread.records[0].code.function) == (10, "?")
    (tmp_path / "x.names").unlink()
    assert lines(path) == [10]


@pytest.mark.parametrize("size", [0, 100, rings.PAGE, rings.size_of(THREADS, LINES) - 1])
def test_a_file_that_is_cut_off_is_no_ring(tmp_path: Path, size: int) -> None:
    path = Path(write(tmp_path, []))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(rings.NotARing):
        rings.read(str(path))


@pytest.mark.parametrize(
    "about", [b"{}", b"not json", b'{"threads": -1, "lines": 4}', b'{"threads": 2, "lines": 99999999999}']
)
def test_a_description_that_makes_no_sense_is_no_ring(tmp_path: Path, about: bytes) -> None:
    path = Path(write(tmp_path, []))
    data = bytearray(path.read_bytes())
    data[8 : 12 + len(about)] = struct.pack("<I", len(about)) + about
    path.write_bytes(data)
    with pytest.raises(rings.NotARing):
        rings.read(str(path))
