"""Names, lines and inlined calls by libdw: beside addr2line, on what was just compiled."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import need

from distdiag.facts import elf
from distdiag.facts.core.binary import Binary
from distdiag.facts.core.cframes import has_debug_information
from distdiag.facts.core.libdw import Lines

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER = """
template <typename T> __attribute__((always_inline)) inline T scaled(T value, void (*fail)()) {
    fail();
    return value * 2;
}
"""
CODE = """
#include "scale.h"
namespace shard {
__attribute__((always_inline)) inline double reduced(double value, void (*fail)()) {
    return scaled(value, fail) + 1;
}
double step(double value, void (*fail)()) {
    return reduced(value, fail) * 3;
}
}
extern "C" double f(double value, void (*fail)()) { return shard::step(value, fail); }
"""


@pytest.fixture(scope="module")
def lines() -> Lines:
    pystack = pytest.importorskip("pystack._pystack")
    return Lines(pystack.__file__)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    need("g++", "readelf", "addr2line", "objcopy")

    def built(*options: str, name: str = "libcode.so") -> Path:
        folder = tmp_path_factory.mktemp("built")
        (folder / "scale.h").write_text(HEADER)
        (folder / "code.cpp").write_text(CODE)
        flags = ("-O2", "-fPIC", "-fno-optimize-sibling-calls")
        command = ["g++", *flags, *options, "-o", name, "code.cpp"]
        subprocess.run(command, cwd=folder, check=True)
        return folder / name

    return built


def at(path: Path, symbol: str) -> int:
    text = subprocess.run(["readelf", "-sW", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(rf"(\w{{16}}) .* {re.escape(symbol)}$", text, re.MULTILINE)[1], 16)  # type: ignore[index]


def by_addr2line(path: Path, address: int) -> list[tuple[str, str, int]]:
    ask = ["addr2line", "-i", "-f", "-C", "-e", str(path), hex(address)]
    told = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines()
    places = (place.partition(" ")[0].rpartition(":") for place in told[1::2])
    return [(name, Path(file).name, int(line)) for name, (file, _, line) in zip(told[::2], places, strict=True)]


def short(told: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    return [(name, Path(file).name, line) for name, file, line in told]


STEP = "_ZN5shard4stepEdPFvvE"


@pytest.mark.parametrize("options", [("-g", "-gdwarf-4"), ("-g", "-gdwarf-5"), ("-g", "-gz")], ids=" ".join)
def test_inlined_calls_come_before_what_they_are_in(
    options: tuple[str, ...], build: Callable[..., Path], lines: Lines
) -> None:
    path = build("-shared", *options)
    begin = at(path, STEP)
    end = Binary(str(path)).function(begin).end
    addresses = list(range(begin, end))
    found = [short(one) for one in lines.of(str(path), addresses)]
    assert found == [by_addr2line(path, address) for address in addresses]
    inside = [name for name, _, _ in max(found, key=len)]
    expected = ("double scaled<double>", "shard::reduced", "shard::step")
    assert inside == [f"{name}(double, void (*)())" for name in expected]


def test_c_names_are_left_alone_and_a_program_has_its_own_addresses(build: Callable[..., Path], lines: Lines) -> None:
    path = build("-g", "-shared")
    assert short(lines.of(str(path), [at(path, "f")])[0]) == [("f", "code.cpp", 11)]
    for options in (("-no-pie",), ("-pie",)):
        program = build("-g", *options, "-Wl,-e,f", "-nostartfiles", name="program")
        address = at(program, STEP)
        assert short(lines.of(str(program), [address])[0]) == by_addr2line(program, address)


def test_debug_information_beside_the_file_is_found(build: Callable[..., Path], lines: Lines) -> None:
    path = build("-shared", "-g")
    address = at(path, STEP)
    expected = by_addr2line(path, address)
    assert has_debug_information(str(path))
    debug = path.parent / "aside.debug"
    subprocess.run(["objcopy", "--only-keep-debug", path, debug], check=True)
    subprocess.run(["strip", path], check=True)
    assert not has_debug_information(str(path))
    assert short(lines.of(str(path), [address])[0]) == [("shard::step(double, void (*)())", "", 0)]
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug}", path], check=True)
    for place in (debug, debug.parent / ".debug" / debug.name):
        place.parent.mkdir(exist_ok=True)
        debug = debug.rename(place)
        assert has_debug_information(str(path))
        assert short(lines.of(str(path), [address])[0]) == expected


def test_a_link_to_debug_information_that_lies_outside_its_file_is_none(build: Callable[..., Path]) -> None:
    path = build("-shared")
    subprocess.run(["objcopy", f"--add-gnu-debuglink={path}", path], check=True)
    data = bytearray(path.read_bytes())
    found = elf.read(str(path))
    assert found is not None
    (link,) = (one for one in found.sections if one.name == ".gnu_debuglink")
    (headers,) = struct.unpack_from("<Q", data, 40)
    for header in range(headers, len(data), 64):
        if struct.unpack_from("<Q", data, header + 24)[0] == link.offset:
            struct.pack_into("<Q", data, header + 24, 1 << 40)
    path.write_bytes(data)
    assert not has_debug_information(str(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "huge"])
def test_what_would_take_long_to_read_is_not_read(kind: str, build: Callable[..., Path]) -> None:
    path = build("-shared", "-g", "-Wl,--build-id=none")
    debug = path.parent / "aside.debug"
    subprocess.run(["objcopy", "--only-keep-debug", path, debug], check=True)
    subprocess.run(["strip", path], check=True)
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug}", path], check=True)
    assert has_debug_information(str(path))
    if kind == "huge":
        os.truncate(debug, 1 << 30)
        assert not has_debug_information(str(path))
        return
    other = debug.parent / ".debug" / debug.name
    other.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(other)
    else:
        other.mkdir()
    assert not has_debug_information(str(path))


def test_without_debug_information_there_are_no_lines(build: Callable[..., Path], lines: Lines) -> None:
    path = build("-shared")
    assert not has_debug_information(str(path))
    assert lines.of(str(path), [at(path, STEP)]) == [[("shard::step(double, void (*)())", "", 0)]]
    assert lines.of(str(path), [0, 2**63]) == [[("", "", 0)], [("", "", 0)]]


def test_what_is_no_library_has_nothing(tmp_path: Path, lines: Lines) -> None:
    (tmp_path / "text").write_text("no library")
    assert lines.of(str(tmp_path / "text"), [4096]) == [[]]
    assert lines.of(str(tmp_path / "not there"), [4096, 8192]) == [[], []]
    assert not has_debug_information(str(tmp_path / "text"))
