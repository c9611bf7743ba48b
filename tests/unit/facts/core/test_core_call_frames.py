"""Call frame information compared with readelf on real libraries; damaged entries are rejected."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest
from loops import each
from support import need

from distdiag.facts import elf
from distdiag.facts.core.binary import Binary
from distdiag.facts.core.call_frames import RETURN_ADDRESS, STACK_POINTER, CannotUnwind, Cie, Fde
from distdiag.facts.process import procs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUMBERS = {"rax": 0, "rdx": 1, "rcx": 2, "rbx": 3, "rsi": 4, "rdi": 5, "rbp": 6, "rsp": 7, "ra": 16}
NUMBERS |= {f"r{number}": number for number in range(8, 16)} | {f"xmm{number}": number + 17 for number in range(16)}
REGISTERS = {number: 0x1000 * (number + 1) for number in range(17)}
KEPT = (3, 6, 12, 13, 14, 15)
MASK = 2**64 - 1


class Row(NamedTuple):
    """One line of readelf's: what holds from an address on, in the function that begins and ends there."""

    begin: int
    end: int
    address: int
    cfa: str
    rules: dict[str, str]


def word(address: int) -> int:
    return address * 3 & MASK


def rows_of(path: str) -> Iterator[Row]:
    text = subprocess.run(
        ["readelf", "-wN", "--debug-dump=frames-interp", path], capture_output=True, text=True, check=False
    )
    begin = end = 0
    columns: list[str] = []
    # "rdi+0  c+0  r9 (r9)": a rule may be two words.
    for line in re.sub(r"r\d+ \((\w+)\)", r"\1", text.stdout).splitlines():
        words = line.split()
        if found := re.search(r"pc=(\w+)\.\.(\w+)", line):
            begin, end = (int(one, 16) for one in found.groups())
        elif "CIE" in words:
            end = 0
        elif words[:1] == ["LOC"]:
            columns = words[2:]
        elif end and words and re.fullmatch("[0-9a-f]{16}", words[0]):
            yield Row(begin, end, int(words[0], 16), words[1], dict(zip(columns, words[2:], strict=True)))


def reported(row: Row) -> dict[int, int] | None:
    """Say what a row makes of REGISTERS; None where it wants an expression, which readelf does not show."""
    if "exp" in (row.cfa, *row.rules.values()) or "vexp" in row.rules.values():
        return None
    base, offset = re.fullmatch(r"(\w+)([+-]\d+)", row.cfa).groups()  # type: ignore[union-attr]
    cfa = REGISTERS[NUMBERS[base]] + int(offset)
    found = {number: REGISTERS[number] for number in KEPT} | {STACK_POINTER: cfa}
    for column, rule in row.rules.items():
        if rule.startswith("c"):
            found[NUMBERS[column]] = word(cfa + int(rule[1:]))
        elif rule.startswith("v"):
            found[NUMBERS[column]] = cfa + int(rule[1:])
        elif rule in NUMBERS:
            found[NUMBERS[column]] = REGISTERS[NUMBERS[rule]]
    return found


def library(name: str) -> str:
    """Find a library that this process has loaded; where Python is linked without it, skip, or fail if promised."""
    paths: list[str] = re.findall(r" (/.+)$", procs.maps(os.getpid()) or "", re.MULTILINE)
    found = [path for path in paths if re.match(name, os.path.basename(path))]
    if not found and os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
        pytest.fail(f"required here and not loaded: {name}")
    if not found:
        pytest.skip(f"this Python has not loaded {name}")
    return found[0]


@pytest.mark.parametrize("name", ["libc[.-]", "ld-", "libm[.-]", "libcrypto", "libffi"])
def test_every_row_is_as_readelf_reads_it(name: str) -> None:
    import ctypes  # noqa: F401 - loads libffi
    import hashlib  # noqa: F401 - loads libcrypto

    need("readelf")
    path = library(name)
    binary = Binary(path)
    rows = {(row.begin, row.address): row for row in rows_of(path)}  # of two for one place the last holds
    assert len(rows) > 100
    compared = 0
    some = list(rows.values())[:: len(rows) // 3000 + 1]
    for row in some:
        function = binary.function(row.address)
        assert (function.begin, function.end) == (row.begin, row.end)
        rules = function.rules(row.address)
        expected = reported(row)
        outermost = row.rules.get("ra") == "u"
        assert rules.outermost == outermost, row
        if expected is not None and not outermost and not function.cie.signal:
            compared += 1
            assert rules.caller_registers(REGISTERS, word) == expected, row
    assert compared > 0.98 * len(some)


def common(program: bytes = b"\x0c\x07\x08\x90\x01", *, letters: bytes = b"zR", more: bytes = b"\x1b") -> Cie:
    """Make what functions share: CFA is rsp+8, the return address below it."""
    return Cie(b"\x01" + letters + b"\0\x01\x78\x10" + bytes([len(more)]) + more + program)


def function(program: bytes, shared: Cie | None = None) -> Fde:
    """Make a function of 256 bytes that begins 0x1000 after its description."""
    return Fde(shared or common(), struct.pack("<iI", 0x1000, 0x100) + b"\0" + program, 0x5000)


def test_a_function_is_found_by_where_it_lies_from_its_description() -> None:
    assert (function(b"").begin, function(b"").end) == (0x6000, 0x6100)
    absolute = common(more=b"\x04")
    there = Fde(absolute, struct.pack("<QQ", 0x6000, 0x100) + b"\0", 0x5000)
    assert (there.begin, there.end) == (0x6000, 0x6100)


@each(
    "program, expected",
    [
        # A remembered state is restored completely, including the CFA.
        (b"\x0e\x10\x86\x02\x0a\x0e\x20\x83\x04\x0b", {7: 0x8010, 6: word(0x8000), 3: 0x4000}),
        # An epilogue: what the function has saved is its caller's again.
        (b"\x86\x02\xc6", {7: 0x8008, 6: 0x7000}),
        (b"\x05\x06\x02\x06\x06", {7: 0x8008, 6: 0x7000}),
        # r12 has moved to rbx; rbx is saved at rsp itself; r13 is CFA-16.
        (b"\x09\x0c\x03", {7: 0x8008, 12: 0x4000}),
        (b"\x10\x03\x02\x77\x00", {7: 0x8008, 3: word(0x8000)}),
        (b"\x14\x0d\x02", {7: 0x8008, 13: 0x7FF8}),
        (b"\x15\x0d\x7e", {7: 0x8008, 13: 0x8018}),
        (b"\x16\x0d\x02\x23\x10", {7: 0x8008, 13: 0x8018}),
        (b"\x07\x03", {7: 0x8008, 3: None}),
        (b"\x0d\x06", {7: 0x7008}),
        (b"\x12\x06\x7e", {7: 0x7010}),
        (b"\x13\x7c", {7: 0x8020}),
        # In a procedure linkage table: 8 more once its first instruction has pushed something.
        (b"\x0f\x0b\x77\x08\x80\x00\x3f\x1a\x3b\x2a\x33\x24\x22", {7: 0x8008}),
        (b"\x0f\x0b\x77\x08\x80\x0c\x3f\x1a\x3b\x2a\x33\x24\x22", {7: 0x8010}),
        # Constants, and both ways to shift and to compare.
        (b"\x0f\x07\x77\x00\x0a\x34\x12\x1c\x06", {7: word(0x8000 - 0x1234)}),
        (b"\x0f\x09\x77\x00\x31\x25\x09\xff\x22\x30\x21", {7: 0x3FFF}),
        (b"\x0f\x04\x09\xff\x30\x2d", {7: 1}),
        (b"\x0f\x04\x09\xff\x30\x2a", {7: 0}),
        # Only instructions before the place count: 5 bytes on rsp+32, then rsp+48 from 0x20 on.
        (b"\x45\x0e\x20\x02\x1b\x0e\x30", {7: 0x8020}),
        (b"\x45\x0e\x20\x03\x0b\x00\x0e\x30", {7: 0x8030}),
        (b"\x04\x10\x00\x00\x00\x0e\x20", {7: 0x8020}),
        (b"\x2e\x08\x00", {7: 0x8008}),
    ],
)
def test_each_instruction_does_what_dwarf_says(program: bytes, expected: dict[int, int | None]) -> None:
    found = function(program).rules(0x6010).caller_registers(REGISTERS, word)
    assert {number: found.get(number) for number in expected} == expected
    assert found[RETURN_ADDRESS] == (word(found[STACK_POINTER] - 8 & MASK))


def test_registers_that_a_call_may_use_are_not_the_callers_but_after_a_signal_they_are() -> None:
    assert set(function(b"").rules(0x6000).caller_registers(REGISTERS, word)) == {*KEPT, STACK_POINTER, RETURN_ADDRESS}
    by_signal = common(letters=b"zRS")
    assert by_signal.signal
    assert set(function(b"", by_signal).rules(0x6000).caller_registers(REGISTERS, word)) == set(range(17))
    with pytest.raises(CannotUnwind):  # an unknown register is no base
        function(b"\x0d\x00").rules(0x6000).caller_registers({7: 0x8000, 16: 0x6000}, word)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(b"\x3f", id="no instruction"),
        pytest.param(b"\x0b", id="nothing was kept"),
        pytest.param(b"\x0f\x03\x77\x00", id="an expression without its end"),
        pytest.param(b"\x0f\x01\x98", id="no operation"),
        pytest.param(b"\x0f\x01\x22", id="nothing to add"),
        pytest.param(b"\x0f\x00", id="an empty expression"),
        pytest.param(b"\x0f\x02\x30\x06\x0e\x10", id="an offset from an expression"),
        pytest.param(b"\x86\x80\x80", id="a number without its end"),
        pytest.param(b"\x02", id="a step without its size"),
        pytest.param(b"\x0d\x40", id="no register"),
        pytest.param(b"\x07\x81\x01", id="more registers than there are"),
        pytest.param(b"\x0a" * 65, id="states without end"),
        pytest.param(b"\x0e" + b"\x80" * 12 + b"\x01", id="a number without end"),
    ],
)
def test_what_is_damaged_gives_no_rules(program: bytes) -> None:
    with pytest.raises(CannotUnwind):
        function(program).rules(0x6010).caller_registers(REGISTERS, word)


def test_what_is_not_needed_is_skipped() -> None:
    assert common(letters=b"zLR", more=b"\x1b\x04").pointers == 4
    assert common(letters=b"zPLR", more=b"\x1b\0\0\0\0\x1b\x04").pointers == 4


def test_shifts_of_any_size_end() -> None:
    for shift in (b"\x24", b"\x25"):
        found = function(b"\x0f\x04\x31\x09\xff" + shift).rules(0x6000).caller_registers(REGISTERS, word)
        assert found[STACK_POINTER] == 0


@each("letters, more", [(b"", b""), (b"zX", b"\x1b"), (b"zP", b"\xff"), (b"z\xff", b"\x1b"), (b"eh", b"\x1b")])
def test_what_is_not_known_is_not_guessed(letters: bytes, more: bytes) -> None:
    with pytest.raises(CannotUnwind):
        common(letters=letters, more=more)
    with pytest.raises(CannotUnwind):
        Cie(b"\x09zR\0\x01\x78\x10\x01\x1b")
    with pytest.raises(CannotUnwind):
        Cie(b"\x01zR")
    with pytest.raises(CannotUnwind):  # the return address in another register
        Cie(b"\x01zR\0\x01\x78\x07\x01\x1b")
    with pytest.raises(CannotUnwind):  # relative to something that is not here
        function(b"", common(more=b"\x3b"))


CODE = """
int square(int x) { return x * x; }
static int hidden(int x) { return square(x) + 1; }
__attribute__((weak)) int often(int x) { return hidden(x); }
int public_name(int x) __attribute__((alias("often")));
int twice(int x) { return hidden(x) + hidden(x + 1); }
__asm__(".globl untyped\\nuntyped: .cfi_startproc\\nret\\n.cfi_endproc");
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("gcc", "readelf")
    folder = tmp_path_factory.mktemp("built")
    (folder / "code.c").write_text(CODE)
    path = folder / "libcode.so"
    subprocess.run(["gcc", "-O1", "-fno-inline", "-shared", "-fPIC", "-o", path, folder / "code.c"], check=True)
    return path


def symbols(path: Path) -> dict[str, int]:
    text = subprocess.run(["readelf", "-sW", path], capture_output=True, text=True, check=True).stdout
    return {
        found[2]: int(found[1], 16)
        for found in re.finditer(r"\d+: (\w{16}) .* (?:FUNC|NOTYPE) .* ([\w.]+)$", text, re.MULTILINE)
    }


def test_a_library_for_another_machine_is_left_alone(built: Path, tmp_path: Path) -> None:
    data = bytearray(built.read_bytes())
    struct.pack_into("<H", data, 18, 183)  # e_machine: aarch64
    path = tmp_path / "other.so"
    path.write_bytes(data)
    with pytest.raises(CannotUnwind):
        Binary(str(path)).function(symbols(built)["twice"])


def test_a_library_without_its_section_headers_is_left_to_others(built: Path, tmp_path: Path) -> None:
    data = bytearray(built.read_bytes())
    data[40:48], data[60:64] = bytes(8), bytes(4)  # e_shoff, e_shnum, e_shstrndx
    path = tmp_path / "without.so"
    path.write_bytes(data)
    at = symbols(built)["twice"]
    assert Binary(str(path)).function(at).begin == at
    with pytest.raises(elf.Malformed):
        Binary(str(path)).names({at})


def test_a_damaged_table_of_symbols_does_not_take_the_names_of_the_other(built: Path, tmp_path: Path) -> None:
    data = bytearray(built.read_bytes())
    (headers,) = struct.unpack_from("<Q", data, 40)
    found = elf.read(str(built))
    assert found is not None
    (table,) = (one for one in found.sections if one.name == ".symtab")
    for header in range(headers, len(data), 64):
        if struct.unpack_from("<Q", data, header + 24)[0] == table.offset:
            struct.pack_into("<Q", data, header + 32, 1 << 60)
    path = tmp_path / "damaged.so"
    path.write_bytes(data)
    at = symbols(built)
    assert Binary(str(path)).names({at["twice"], at["hidden"]}) == {at["twice"]: "twice"}


def test_functions_are_named_by_their_symbols(built: Path, tmp_path: Path) -> None:
    at = symbols(built)
    names = ("square", "hidden", "often", "twice", "untyped")
    found = Binary(str(built)).names({at[name] for name in names} | {at["square"] + 1, 0xFFFF_FFFF_FFFF})
    # Of two names, the symbol protected from interposition.
    assert found == {at[name]: name for name in ("square", "hidden", "twice", "untyped")} | {at["often"]: "public_name"}
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", stripped, built], check=True)
    assert "hidden" not in Binary(str(stripped)).names({at["hidden"], at["twice"]}).values()
    assert Binary(str(stripped)).function(at["hidden"] + 1).begin == at["hidden"]


def test_a_symbol_four_gigabytes_away_gives_no_name(built: Path, tmp_path: Path) -> None:
    at = symbols(built)
    data = built.read_bytes()
    # The value of a symbol comes before its size; "square" is global, which counts for more than "hidden".
    own, far = struct.pack("<Q", at["square"]), struct.pack("<Q", at["hidden"] + (1 << 32))
    found = elf.read(str(built))
    assert found is not None
    for table in (one for one in found.sections if one.name in (".symtab", ".dynsym")):
        begin, end = table.offset, table.offset + table.size
        assert own in data[begin:end]
        data = data[:begin] + data[begin:end].replace(own, far) + data[end:]
    path = tmp_path / "far.so"
    path.write_bytes(data)
    assert Binary(str(path)).names({at["hidden"], at["twice"]}) == {at[name]: name for name in ("hidden", "twice")}


def test_a_damaged_library_is_refused_and_nothing_else_happens(built: Path, tmp_path: Path) -> None:
    whole, chance = built.read_bytes(), random.Random(7)
    found = elf.read(str(built))
    assert found is not None
    places = [at for name, at in symbols(built).items() if name in ("square", "hidden", "twice")]
    eh_frames = [one for one in found.sections if one.name.startswith(".eh_frame")]
    path = tmp_path / "damaged.so"
    refused = 0
    for number in range(600):
        data = bytearray(whole)
        section = chance.choice(eh_frames)
        # In turn: some bytes of the tables, some of the headers, the end.
        if number % 3 == 0:
            for _ in range(4):
                data[section.offset + chance.randrange(section.size)] = chance.randrange(256)
        elif number % 3 == 1:
            data[chance.randrange(64 + 56 * 8)] = chance.randrange(256)
        else:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            binary = Binary(str(path))
            binary.names(set(places))
            for at in places:
                function = binary.function(at + 1)
                assert function.begin <= at + 1 < function.end
                function.rules(at + 1).caller_registers(REGISTERS, word)
        except (CannotUnwind, OSError, ValueError, elf.Malformed, struct.error):
            refused += 1
    assert refused > 100
