"""Names, lines and inlined calls of freshly compiled code."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from support import need

from distdiag.facts.core import source_lines
from distdiag.facts.core.binary import Binary
from distdiag.facts.core.source_lines import has_debug_information

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
STEP = "_ZN5shard4stepEdPFvvE"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    need("g++", "readelf", "addr2line", "objcopy")

    def built(*options: str, name: str = "libcode.so") -> Path:
        folder = tmp_path_factory.mktemp("built")
        (folder / "scale.h").write_text(HEADER)
        (folder / "code.cpp").write_text(CODE)
        flags = ("-O2", "-fPIC", "-fno-optimize-sibling-calls")
        subprocess.run(["g++", *flags, *options, "-o", name, "code.cpp"], cwd=folder, check=True)
        return folder / name

    return built


def at(path: Path, symbol: str) -> int:
    text = subprocess.run(["readelf", "-sW", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(rf"(\w{{16}}) .* {re.escape(symbol)}$", text, re.MULTILINE)[1], 16)  # type: ignore[index]


def lines_of(path: Path, *addresses: int) -> list[list[tuple[str, str, int]]]:
    found, why = source_lines.read({str(path): addresses})
    assert why == ""
    return [
        [(name, os.path.basename(file), line) for name, file, line in found[str(path), address]]
        for address in addresses
    ]


@pytest.mark.parametrize("options", [("-g", "-gdwarf-4"), ("-g", "-gdwarf-5"), ("-g", "-gz")], ids=" ".join)
def test_inlined_calls_come_before_what_they_are_in(options: tuple[str, ...], build: Callable[..., Path]) -> None:
    path = build("-shared", *options)
    begin = at(path, STEP)
    found = lines_of(path, *range(begin, Binary(str(path)).function(begin).end))
    (after_call,) = {tuple(frames) for frames in found if len(frames) == 3 and frames[0][2] == 3}
    assert [(name.partition("(")[0].split()[-1], *place) for name, *place in after_call] == [
        ("scaled<double>", "scale.h", 3),
        ("shard::reduced", "code.cpp", 5),
        ("shard::step", "code.cpp", 8),
    ]


def test_c_names_are_left_alone_and_a_program_has_its_own_addresses(build: Callable[..., Path]) -> None:
    path = build("-g", "-shared")
    assert lines_of(path, at(path, "f")) == [[("f", "code.cpp", 11)]]
    for option in ("-no-pie", "-pie"):
        program = build("-g", option, "-Wl,-e,f", "-nostartfiles", name="program")
        ((*_, last),) = lines_of(program, at(program, STEP))
        assert last == ("shard::step(double, void (*)())", "code.cpp", 7)


def test_debug_information_beside_the_file_is_found(build: Callable[..., Path]) -> None:
    path = build("-shared", "-g")
    address = at(path, "f")
    assert has_debug_information(str(path))
    debug = path.parent / "aside.debug"
    subprocess.run(["objcopy", "--only-keep-debug", path, debug], check=True)
    subprocess.run(["strip", path], check=True)
    assert not has_debug_information(str(path))
    assert lines_of(path, address) == [[("f", "", 0)]]
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug}", path], check=True)
    for place in (debug, debug.parent / ".debug" / debug.name):
        place.parent.mkdir(exist_ok=True)
        debug = debug.rename(place)
        assert has_debug_information(str(path))
        assert lines_of(path, address) == [[("f", "code.cpp", 11)]]
    debug.unlink()
    os.mkfifo(debug)
    assert not has_debug_information(str(path)), "a pipe is no debug information"


def test_what_has_no_lines_has_none(build: Callable[..., Path], tmp_path: Path) -> None:
    path = build("-shared")
    assert not has_debug_information(str(path))
    assert lines_of(path, at(path, STEP), 0) == [[("shard::step(double, void (*)())", "", 0)], [("", "", 0)]]
    (tmp_path / "text").write_text("no library")
    assert source_lines.read({str(tmp_path / "text"): [4096], str(tmp_path / "gone"): [4096]}) == ({}, "")
    assert not has_debug_information(str(tmp_path / "text"))
