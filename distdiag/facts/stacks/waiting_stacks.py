"""The Python frames of a main thread, read from its memory without pausing it or starting a program.

A stack changes only while its thread runs. So the state and the number of switches (how often the thread went to sleep)
are read before and after: a thread asleep both times with no switch in between did not run, and the frames are as
reliable as if it had been stopped. A thread that runs in C, such as one that spins in a GPU driver, does not touch its
Python frames: it is read twice, and equal readings count. Any other case (running Python, an unknown version, an object
of an unexpected type) is left to py-spy.

Memory layouts of CPython 3.11 to 3.13: Include/internal/pycore_{runtime,interp,frame}.h and Include/cpython/*.h of
these versions; 3.13 publishes its offsets in the interpreter itself (_Py_DebugOffsets). Lines: Objects/locations.md.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import time
import zlib
from typing import NamedTuple

from distdiag.facts import elf, machine
from distdiag.facts.process import procs
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SYMBOLS = ("_PyRuntime", "Py_Version", "PyCode_Type", "PyDict_Type", "PyUnicode_Type")
_MAPPED = re.compile(r"^([0-9a-f]+)-\S+ \S+ 0+ \S+ \d+ +(/.*)$", re.MULTILINE)
_MOST_FRAMES, _MOST_THREADS, _MOST_INTERPRETERS = 4096, 10_000, 64
_LONGEST_TEXT, _LONGEST_TABLE, _MOST_NAMES = 4096, 1 << 20, 4096
_MOST_TEXT = 2 << 20
"""Limit of letters in all frames together: a node sends a process as one line of at most 4 MiB."""
_MOST_S = 0.5
_MOST_DIGESTED = 64
"""Limit of local variables per frame: the cost of more exceeds their value as proof."""


class Unclear(Exception):
    """It runs Python code, or is not a known Python, or unreadable."""


class Frame(NamedTuple):
    """One frame; `whole_numbers`: the requested local variables that hold an int.

    `digest`: a checksum of all local variables: ints and floats by value, other objects by address. It changes with any
    assignment in the frame. 0 if unknown, as for a module, whose variables any thread may assign.
    """

    function: str
    file: str
    line: int
    whole_numbers: tuple[tuple[str, int], ...]
    digest: int = 0


class Main(NamedTuple):
    """A main thread, innermost frame first, and the thread with the interpreter's lock, if any."""

    frames: tuple[Frame, ...]
    gil_holder: int | None


class _Layout(NamedTuple):
    """Offsets, in bytes, that differ between versions; the defaults are for 3.13.

    `gil`: offset of an interpreter's pointer to its lock; None: one lock for all, a part of the runtime. `behind`:
    offset of the frame pointer in the _PyCFrame that a thread points to; None: it points to the frame. `held_by_c`: the
    owner value of a frame that represents the interpreter's own loop. `sign_in_tag`: an int's size and sign share one
    number, the sign in its lowest bits.
    """

    interpreters: int = 632
    next_interpreter: int = 7264
    threads: int = 7344
    gil: int | None = 16
    native_id: int = 160
    frame: int = 72
    behind: int | None = None
    code: int = 0
    previous: int = 8
    namespace: int = 40
    held_by_c: int | None = 3
    first_line: int = 68
    instructions: int = 200
    ascii_text: int = 40
    other_text: int = 56
    sign_in_tag: bool = True


_LAYOUTS = {
    0x030B: _Layout(
        interpreters=40,
        next_interpreter=0,
        threads=16,
        gil=None,
        native_id=160,
        frame=56,
        behind=8,
        code=32,
        previous=48,
        namespace=24,
        held_by_c=None,
        first_line=72,
        instructions=184,
        ascii_text=48,
        other_text=72,
        sign_in_tag=False,
    ),
    0x030C: _Layout(
        interpreters=40, next_interpreter=0, threads=72, gil=384, native_id=144, frame=56, behind=0, instructions=192
    ),
    0x030D: _Layout(),
}
_GIL_OF_ALL = 360
# The same in all versions: of a frame, of a code object, of objects.
_NEXT_THREAD, _INSTRUCTION, _OWNER, _LOCALS, _FRAME_BYTES = 8, 56, 70, 72, 72 + 24 * 8
_TYPE_NAME, _TYPE_FLAGS, _IS_INT = 24, 168, 1 << 24
_NAMES, _FILE, _QUALIFIED_NAME, _LINES, _CODE_BYTES = 96, 112, 128, 136, 144
_TYPE, _SIZE, _ITEMS, _BYTES = 8, 16, 24, 32
_KEYS, _KEYS_BYTES, _OF_NAMES = 32, 32, 1
"""Of a dictionary: offset of its table, size of the table's head, and the kind value for string keys only."""


def main_thread(pid: int, wanted: re.Pattern[str] | None = None) -> Main:
    """Read the main thread of a process, with the local variables whose names fully match `wanted`.

    Raises:
        Unclear: it cannot be read reliably this way.
    """
    before = _state_and_switches(pid)
    runs = before[0] == "R"
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Unclear from error
    try:
        process = _Process(pid, fd, wanted)
        main = process.main()
        if runs and process.main() != main:
            raise Unclear
    except (OSError, ValueError, OverflowError, IndexError, struct.error, elf.Malformed) as error:
        raise Unclear from error
    finally:
        os.close(fd)
    if runs:
        return main
    # The kernel checks that it is off its processors: shortly before that, a thread is already in state "S".
    if machine.read_text(f"/proc/{pid}/syscall").startswith("running") or _state_and_switches(pid) != before:
        raise Unclear
    return main


def _state_and_switches(pid: int) -> tuple[str, str]:
    """Return the state of a main thread, and its number of voluntary switches."""
    text = machine.read_text(f"/proc/{pid}/status")
    found = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("State:", "NSpid:", "voluntary")))
    state, switches = found.get("State", "").split(), found.get("voluntary_ctxt_switches", "").strip()
    # In a container, Python has other thread ids than we see.
    if not state or state[0] not in "RSDTt" or not switches or len(found.get("NSpid", "").split()) > 1:
        raise Unclear
    return state[0], switches


_known: dict[tuple[int, ...], dict[str, int]] = {}


def _interpreter(pid: int) -> dict[str, int]:
    """Find the addresses of the symbols, in libpython or in the program itself.

    Symbols in both are taken from the program: a linker may copy a library's data there (a copy relocation).
    """
    program = procs.program(pid)
    found: dict[str, int] = {}
    for start, path in _MAPPED.findall(procs.maps(pid) or ""):
        if path == program or os.path.basename(path).startswith("libpython3"):
            there = f"/proc/{pid}/root{path}"
            try:
                state = os.stat(there)
            except OSError:  # replaced since
                continue
            key = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
            if key not in _known:
                _known[key] = exported_symbols(there, _SYMBOLS)
            its = {name: int(start, 16) + offset for name, offset in _known[key].items()}
            found = {**found, **its} if path == program else {**its, **found}
    if len(found) < len(_SYMBOLS):
        raise Unclear
    return found


class _Code(NamedTuple):
    """Data of a frame's code object. `variables`: number of locals; `wanted`: positions of the requested ones."""

    function: str
    file: str
    first_line: int
    lines: bytes
    instructions: int
    variables: int
    wanted: tuple[tuple[int, str], ...]


class _Process:
    def __init__(self, pid: int, fd: int, wanted: re.Pattern[str] | None) -> None:
        self._pid, self._fd, self._wanted = pid, fd, wanted
        self._at = _interpreter(pid)
        self._until = time.monotonic() + _MOST_S
        self._texts: dict[int, str] = {}
        self._types: dict[int, str] = {}
        self._codes: dict[int, _Code] = {}
        version = self._word(self._at["Py_Version"]) >> 16
        if version not in _LAYOUTS:
            raise Unclear
        self._layout = _LAYOUTS[version]
        if version == 0x030D:
            self._ask_offsets()

    def main(self) -> Main:
        interpreter = self._word(self._at["_PyRuntime"] + self._layout.interpreters)
        threads: dict[int, tuple[int, int]] = {}
        holders: set[int] = set()
        for _ in range(_MOST_INTERPRETERS):
            if not interpreter:
                break
            threads.update(self._threads(interpreter))
            holders.add(self._holder(interpreter))
            interpreter = self._word(interpreter + self._layout.next_interpreter)
        mine = [thread for thread, (native, _) in threads.items() if native == self._pid]
        # One thread may run several interpreters, one within another.
        if len(mine) != 1:
            raise Unclear
        frame = threads[mine[0]][1]
        if self._layout.behind is not None:
            frame = self._word(frame + self._layout.behind)
        holder = next((threads[thread][0] for thread in holders if thread in threads), None)
        frames = tuple(self._frames(frame))
        if not frames or sum(len(frame.function) + len(frame.file) for frame in frames) > _MOST_TEXT:
            raise Unclear
        return Main(frames, holder)

    def _ask_offsets(self) -> None:
        """Read the offsets published by 3.13; its fields are numbers of 8 bytes."""
        data = self._read(self._at["_PyRuntime"], 27 * 8)
        cookie, _, free_threaded, *words = struct.unpack("<8s26Q", data)
        if cookie != b"xdebugpy" or free_threaded:
            raise Unclear
        self._layout = self._layout._replace(
            interpreters=words[2], next_interpreter=words[5], threads=words[6], gil=words[11]
        )

    def _threads(self, interpreter: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """List the threads of an interpreter: address, native id, pointer to the innermost frame."""
        thread = self._word(interpreter + self._layout.threads)
        for _ in range(_MOST_THREADS):
            if not thread:
                return
            data = self._read(thread, self._layout.native_id + 8)
            (native,) = struct.unpack_from("<Q", data, self._layout.native_id)
            (frame,) = struct.unpack_from("<Q", data, self._layout.frame)
            yield thread, (native, frame)
            (thread,) = struct.unpack_from("<Q", data, _NEXT_THREAD)
        raise Unclear

    def _holder(self, interpreter: int) -> int:
        """Return the thread with the interpreter's lock; 0 if it is free."""
        gil = self._layout.gil
        lock = self._at["_PyRuntime"] + _GIL_OF_ALL if gil is None else self._word(interpreter + gil)
        holder, locked = struct.unpack("<8xQi", self._read(lock, 20))
        return int(holder) if locked == 1 else 0

    def _frames(self, frame: int) -> Iterator[Frame]:
        for _ in range(_MOST_FRAMES):
            if not frame:
                return
            if time.monotonic() > self._until:
                break
            data = self._read(frame, _LOCALS, _FRAME_BYTES)
            (code,) = struct.unpack_from("<Q", data, self._layout.code)
            (instruction,) = struct.unpack_from("<Q", data, _INSTRUCTION)
            if self._layout.held_by_c is None or data[_OWNER] != self._layout.held_by_c:
                its = self._code(code)
                line = _line(its.lines, its.first_line, (instruction - its.instructions) // 2)
                # 3.13 has an extra frame without a line between a class and its __init__.
                if line is None and not its.function == its.file == "__init__":
                    break
                line = line or 0
                numbers = self._whole_numbers(frame, data, its.wanted)
                if its.function == "<module>" and self._wanted is not None:
                    numbers = self._globals(struct.unpack_from("<Q", data, self._layout.namespace)[0])
                digest = 0 if its.function == "<module>" else self._digest(frame, data, its.variables)
                yield Frame(its.function, its.file, line, tuple(numbers), digest)
            (frame,) = struct.unpack_from("<Q", data, self._layout.previous)
        raise Unclear

    def _code(self, address: int) -> _Code:
        known = self._codes.get(address)
        if known is None:
            data = self._typed(address, "PyCode_Type", _CODE_BYTES)
            first_line, variables = struct.unpack_from("<ii", data, self._layout.first_line)
            if not 0 <= variables <= _MOST_NAMES:
                raise Unclear
            file, name, lines = (struct.unpack_from("<Q", data, at)[0] for at in (_FILE, _QUALIFIED_NAME, _LINES))
            (names,) = struct.unpack_from("<Q", data, _NAMES)
            known = self._codes[address] = _Code(
                self._text(name),
                self._text(file),
                first_line,
                self._bytes(lines),
                address + self._layout.instructions,
                variables,
                tuple(self._wanted_of(names)),
            )
        return known

    def _wanted_of(self, names: int) -> Iterator[tuple[int, str]]:
        if self._wanted is None:
            return
        (count,) = struct.unpack_from("<Q", self._read(names, _ITEMS), _SIZE)
        if count > _MOST_NAMES:
            raise Unclear
        for at, name in enumerate(struct.unpack(f"<{count}Q", self._read(names + _ITEMS, count * 8))):
            if self._wanted.fullmatch(text := self._text(name)):
                yield at, text

    def _whole_numbers(self, frame: int, data: bytes, wanted: tuple[tuple[int, str], ...]) -> Iterator[tuple[str, int]]:
        for number, name in wanted:
            at = _LOCALS + number * 8
            value = struct.unpack_from("<Q", data, at)[0] if at + 8 <= len(data) else self._word(frame + at)
            if value and (whole := self._whole_number(value)) is not None:
                yield name, whole

    def _globals(self, address: int) -> Iterator[tuple[str, int]]:
        """Read the variables of a module, which are in a dictionary: Objects/dictobject.c."""
        assert self._wanted is not None
        (table,) = struct.unpack_from("<Q", self._typed(address, "PyDict_Type", _KEYS + 8), _KEYS)
        _, index, kind, _, count = struct.unpack_from("<8xBBB5xqq", self._read(table, _KEYS_BYTES))
        if kind != _OF_NAMES or not 0 <= count <= _MOST_NAMES or index > 32:
            return
        entries = struct.unpack(f"<{2 * count}Q", self._read(table + _KEYS_BYTES + (1 << index), 16 * count))
        for name, value in zip(entries[::2], entries[1::2]):
            if name and value and self._wanted.fullmatch(text := self._text(name)):
                whole = self._whole_number(value)
                if whole is not None:
                    yield text, whole

    def _whole_number(self, address: int) -> int | None:
        """Read an int of up to two digits of 30 bits; None for any other object, and for True and False."""
        kind, size, digits = struct.unpack("<8xQqQ", self._read(address, 32))
        if self._type_of(kind) != "int":
            return None
        count, negative = (size >> 3, size & 3 == 2) if self._layout.sign_in_tag else (abs(size), size < 0)
        if count > 2:
            return None
        value = (digits & 0x3FFFFFFF if count else 0) | (digits >> 32 << 30 if count == 2 else 0)
        return -value if negative else value

    def _type_of(self, address: int) -> str:
        """Return "int" or "float" for these types, "" for any other."""
        if address not in self._types:
            (flags,) = struct.unpack("<Q", self._read(address + _TYPE_FLAGS, 8))
            name = self._read(self._word(address + _TYPE_NAME), 6)
            is_int = bool(flags & _IS_INT) and name[:5] != b"bool\0"
            self._types[address] = "int" if is_int else "float" if name == b"float\0" else ""
        return self._types[address]

    def _digest(self, frame: int, data: bytes, variables: int) -> int:
        variables = min(variables, _MOST_DIGESTED)
        end = _LOCALS + variables * 8
        local = data[_LOCALS:end] if end <= len(data) else self._read(frame + _LOCALS, variables * 8)
        values = [self._value_of(word) for (word,) in struct.iter_unpack("<Q", local)]
        return zlib.crc32(b"".join(values)) or 1

    def _value_of(self, address: int) -> bytes:
        """Return an int's or a float's bytes, as a new object may reuse the address of a freed one."""
        word = address.to_bytes(8, "little")
        try:
            head = os.pread(self._fd, 32, address) if address else b""
            kind = self._type_of(int.from_bytes(head[8:16], "little")) if len(head) == 32 else ""
        except (OSError, OverflowError, Unclear):
            return word
        return head[16:24] if kind == "float" else head[16:] if kind == "int" else word

    def _text(self, address: int) -> str:
        text = self._texts.get(address)
        if text is None:
            data = self._typed(address, "PyUnicode_Type", self._layout.ascii_text, 256)
            length, state = struct.unpack_from("<Q8xI", data, _SIZE)
            kind, compact, is_ascii = state >> 2 & 7, state & 0x20, state & 0x40
            start = self._layout.ascii_text if is_ascii else self._layout.other_text
            end = start + length * kind
            if not compact or kind not in (1, 2, 4) or length > _LONGEST_TEXT:
                raise Unclear
            data = data if end <= len(data) else self._read(address, end)
            encoding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[kind]
            text = self._texts[address] = printable(data[start:end].decode(encoding, "replace"))
        return text

    def _bytes(self, address: int) -> bytes:
        (size,) = struct.unpack_from("<Q", self._read(address, _ITEMS), _SIZE)
        if size > _LONGEST_TABLE:
            raise Unclear
        return self._read(address + _BYTES, size)

    def _typed(self, address: int, kind: str, least: int, most: int = 0) -> bytes:
        data = self._read(address, least, most)
        if struct.unpack_from("<Q", data, _TYPE)[0] != self._at[kind]:
            raise Unclear
        return data

    def _word(self, address: int) -> int:
        return int.from_bytes(self._read(address, 8), "little")

    def _read(self, address: int, least: int, most: int = 0) -> bytes:
        """Read up to `most` bytes; Unclear if fewer than `least`."""
        data = os.pread(self._fd, most or least, address)
        if len(data) < least:
            raise Unclear
        return data


@functools.lru_cache(maxsize=512)  # the ranks of a job wait at the same lines
def _line(table: bytes, first: int, instruction: int) -> int | None:
    """Return an instruction's line; None if it has none.

    Entries cover 1 to 8 instructions each, with the line as a difference to the entry before. Only an entry's first
    byte has its highest bit set: kind in bits 3 to 6, number of instructions less 1 below.
    """
    if instruction < 0:
        return first
    line, at, covered = first, 0, 0
    while at < len(table):
        kind = table[at] >> 3 & 15
        covered += (table[at] & 7) + 1
        at += 1
        if kind in (13, 14):
            line += _difference(table, at)
        elif 10 <= kind <= 12:
            line += kind - 10
        if instruction < covered:
            return None if kind == 15 else line
        while at < len(table) and table[at] < 128:
            at += 1
    raise Unclear


def _difference(table: bytes, at: int) -> int:
    """Read a number in pieces of 6 bits, lowest first; bit 6 marks a further piece, bit 0 of the whole is the sign."""
    value = shift = 0
    while True:
        value |= (table[at] & 63) << shift
        if not table[at] & 64:
            return -(value >> 1) if value & 1 else value >> 1
        at, shift = at + 1, shift + 6


_HEADER, _SEGMENT = struct.Struct("<32xQ16xH6x"), struct.Struct("<I4xQQ8xQ16x")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 5, 6, 0x6FFFFEF5
_SYMBOL_BYTES = 24
_LONGEST_CHAIN = 4096


def exported_symbols(path: str, names: Iterable[str]) -> dict[str, int]:
    """Return the addresses of these exported symbols, relative to the file's first byte in memory.

    The small part of a dynamic linker needed for this: the hash table of GNU's linkers (DT_GNU_HASH) is a bloom filter,
    buckets, and for each bucket a chain of hashes whose end has the last bit set; names and values are in the dynamic
    symbols (System V ABI, chapter 5). Symbols not exported are omitted.

    Raises:
        OSError, ValueError, elf.Malformed, struct.error: it cannot be read, or is not a 64-bit ELF file.
    """
    with elf.File(path) as file:
        at, count = _HEADER.unpack(file.at(0, _HEADER.size))
        rows = list(_SEGMENT.iter_unpack(file.at(at, count * _SEGMENT.size)))
        loaded = [row[1:] for row in rows if row[0] == _PT_LOAD]
        dynamic = next((row for row in rows if row[0] == _PT_DYNAMIC), None)
        if dynamic is None or not loaded:
            return {}
        tags = dict(struct.iter_unpack("<QQ", file.at(dynamic[1], dynamic[3] - dynamic[3] % 16)))
        if not {_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH} <= tags.keys():
            return {}
        strings, symbols, hashes = (_in_file(tags[tag], loaded) for tag in (_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH))
        first = next((address for offset, address, _ in loaded if offset == 0), 0)
        found = {}
        for name in names:
            for index in _same_hash(file, hashes, name):
                where, value = struct.unpack("<I4xQ8x", file.at(symbols + index * _SYMBOL_BYTES, _SYMBOL_BYTES))
                if file.name_at(strings + where) == name:
                    found[name] = value - first
        return found


def _same_hash(file: elf.File, table: int, name: str) -> list[int]:
    """List the symbols with the hash of a name, except for the last bit, which marks the end of a chain."""
    hashed = 5381
    for letter in name.encode():
        hashed = (hashed * 33 + letter) & 0xFFFFFFFF
    buckets, skipped, bloom, _ = struct.unpack("<4I", file.at(table, 16))
    if buckets == 0:
        return []
    starts = table + 16 + bloom * 8
    (index,) = struct.unpack("<I", file.at(starts + hashed % buckets * 4, 4))
    found: list[int] = []
    while index >= skipped and len(found) < _LONGEST_CHAIN:
        (its,) = struct.unpack("<I", file.at(starts + (buckets + index - skipped) * 4, 4))
        if its | 1 == hashed | 1:
            found.append(index)
        if its & 1:
            break
        index += 1
    return found


def _in_file(address: int, loaded: Iterable[tuple[int, int, int]]) -> int:
    for offset, start, size in loaded:
        if start <= address < start + size:
            return offset + address - start
    raise elf.Malformed
