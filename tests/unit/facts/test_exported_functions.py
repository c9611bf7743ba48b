"""An address is named by the exported function around it, and by no other."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from loops import each
from support import need

from distdiag.facts import elf
from distdiag.facts.stacks import exported_functions, stack_libraries

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = r"""
int pncclCommInitRank(int x) { return x * 3 + 1; }
__attribute__((alias("pncclCommInitRank"))) int ncclCommInitRank(int x);
static __attribute__((noinline)) int hidden(int x) { return x * 7; }
int ncclAllReduce(int x) { return hidden(x) + 1; }
__asm__(".text\n.globl sizeless\nsizeless:\n.rept 16\nnop\n.endr\nret\n.globl after\n.type after,@function\nafter:\n"
        "nop\nret\n.size after,.-after\n");
int ncclVersion = 22705;
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("gcc", "readelf")
    path = tmp_path_factory.mktemp("lib") / "libnccl.so.2"
    path.with_suffix(".c").write_text(SOURCE)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", path, path.with_suffix(".c")], check=True, timeout=60)
    return path


def _symbols(path: Path) -> dict[str, tuple[int, int]]:
    listed = subprocess.run(["readelf", "-Ws", path], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return {row[7]: (int(row[1], 16), int(row[2])) for row in rows if len(row) == 8 and row[0][:-1].isdigit()}


def test_each_byte_of_a_function_is_its_own(library: Path) -> None:
    # Code is at the same offset in the file as in memory, as GNU's linker lays out a library.
    functions, symbols = exported_functions.of_file(str(library)), _symbols(library)
    for name, shown in (("pncclCommInitRank", "ncclCommInitRank"), ("ncclAllReduce", "ncclAllReduce"), ("after",) * 2):
        begin, size = symbols[name]
        assert {functions.name(at) for at in range(begin, begin + size)} == {shown}
    begin, size = symbols["hidden"]
    assert {functions.name(at) for at in range(begin, begin + size)} == {""}


def test_a_function_without_a_size_reaches_to_the_next(library: Path) -> None:
    functions, symbols = exported_functions.of_file(str(library)), _symbols(library)
    code = range(symbols["sizeless"][0], symbols["after"][0])
    assert len(code) >= 17
    assert {functions.name(at) for at in code} == {"sizeless"}


def test_a_file_is_read_again_when_it_has_changed(library: Path, tmp_path: Path) -> None:
    copy = tmp_path / "libnccl.so.2"
    copy.write_bytes(library.read_bytes())
    assert exported_functions.of_file(str(copy)) is exported_functions.of_file(str(copy))
    before = exported_functions.of_file(str(copy))
    os.utime(copy, ns=(1, 1))
    assert exported_functions.of_file(str(copy)) is not before


@pytest.mark.parametrize("size", [0, 10, 64, 2000])
def test_a_file_that_is_cut_off_is_no_library(library: Path, tmp_path: Path, size: int) -> None:
    short = tmp_path / "short"
    short.write_bytes(library.read_bytes()[:size])
    with pytest.raises(elf.Malformed):
        exported_functions.of_file(str(short))


CALLS = ["ffd0", "ff10", "ff5008", "ff5424" + "10", "ff1425" + "00" * 4, "ff15" + "00" * 4, "ff9424" + "40030000"]
OTHERS = ["ffe0", "ff30", "ff25" + "00" * 4, "ffd000", "ff10" + "00" * 2]


@each("code", CALLS)
def test_calls_through_registers_and_memory_are_known(code: str) -> None:
    assert stack_libraries.ends_with_indirect_call(bytes.fromhex(code).rjust(8, b"\x90"))


@each("code", OTHERS)
def test_other_instructions_are_no_calls(code: str) -> None:
    assert not stack_libraries.ends_with_indirect_call(bytes.fromhex(code).rjust(8, b"\x90"))
