"""What the notes of a core tell: of programs that really died, whole, cut off, damaged and packed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cores import PROGRAMS, make_core
from loops import each
from support import need

from distdiag.facts import elf, packed_files
from distdiag.facts.core import core_file, stored_cores
from distdiag.facts.core.core_file import CoreNotes, Image, NotACore, OtherMachine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    CoreOf = Callable[[str], Path]

NATIVE = ("dies_in_cpp_thread", "dies_by_cpp_exception", "dies_by_stack_overflow")
MAPERR, ADRERR, TKILL = 1, 2, -6  # si_code, sigaction(2)
BAD_ADDRESS = 0xDEAD0
_TYPE, _MACHINE, _SECTIONS_AT, _SEGMENT_COUNT = 0x10, 0x12, 0x28, 0x38  # in the header, elf(5)
_SEGMENT_BYTES, _HEADER_BYTES = 56, 64
PACK = {
    packed_files.Packing.GZIP: ["gzip", "-c", "-1"],
    packed_files.Packing.XZ: ["xz", "-c", "-0"],
    packed_files.Packing.ZSTD: ["zstd", "-cq"],
    packed_files.Packing.LZ4: ["lz4", "-cq", "-B4"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where programs die."""
    path = tmp_path_factory.mktemp("cores")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def core_of(folder: Path) -> CoreOf:
    """The core of a program, which is run once."""
    made: dict[str, Path] = {}

    def find(program: str) -> Path:
        if program not in made:
            if program in NATIVE:
                need("g++")
            (folder / program).mkdir(exist_ok=True)
            made[program] = make_core(program, folder / program, *([str(folder)] if program in NATIVE else []))
        return made[program]

    return find


@pytest.fixture(scope="module")
def core(core_of: CoreOf) -> Path:
    return core_of("dies_by_segv")


@pytest.fixture
def copy(core: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(core, tmp_path / "copy"))


def why_not(path: Path) -> str:
    with pytest.raises(NotACore) as refusal:
        core_file.read(str(path))
    return str(refusal.value)


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def notes_end(path: Path) -> int:
    with elf.File(str(path)) as file:
        return max(note.offset + note.size for note in Image(file).notes())


def mapped_at(found: CoreNotes, address: int | None) -> core_file.MappedFile:
    assert address is not None
    return next(file for file in found.files if file.start <= address < file.end)


@pytest.mark.parametrize(
    ("program", "number", "code", "by_itself"),
    [
        ("dies_by_segv", signal.SIGSEGV, MAPERR, False),
        ("dies_by_sigbus", signal.SIGBUS, ADRERR, False),
        ("dies_in_cpp_thread", signal.SIGABRT, TKILL, True),
        ("dies_by_cpp_exception", signal.SIGABRT, TKILL, True),
        ("dies_by_stack_overflow", signal.SIGSEGV, MAPERR, False),
        # faulthandler raises the signal again: the core no longer tells the address
        ("dies_with_faulthandler", signal.SIGSEGV, TKILL, True),
    ],
)
def test_a_core_tells_the_signal_and_where_it_came_from(
    core_of: CoreOf, program: str, number: int, code: int, by_itself: bool
) -> None:
    found = core_file.read(str(core_of(program)))
    assert (found.signal, found.code, found.sender_pid) == (number, code, found.pid if by_itself else None)
    assert (found.address is None) == by_itself
    assert {thread.signal for thread in found.threads} == {number}
    assert (found.machine, found.uid, found.truncated) == (os.uname().machine, os.getuid(), False)
    assert found.size_bytes == found.whole_bytes == core_of(program).stat().st_size
    command = f"{sys.executable} {PROGRAMS / program}.py"
    assert found.arguments.startswith(command[:79].rstrip())
    assert (found.program, found.execfn) == (Path(sys.executable).name[:15], sys.executable)


def test_the_address_is_that_which_was_read(core_of: CoreOf) -> None:
    assert core_file.read(str(core_of("dies_by_segv"))).address == BAD_ADDRESS
    found = core_file.read(str(core_of("dies_by_sigbus")))
    file = mapped_at(found, found.address)
    assert file.path == str(core_of("dies_by_sigbus").with_name("samples.bin"))
    assert (file.offset, found.address) == (0, file.start + 5 * os.sysconf("SC_PAGESIZE"))


def test_the_first_thread_is_the_one_that_crashed(core_of: CoreOf) -> None:
    found = core_file.read(str(core_of("dies_in_cpp_thread")))
    aborting, *others = found.threads
    assert aborting.tid != found.pid
    assert found.pid in {thread.tid for thread in others}
    assert "libc" in mapped_at(found, aborting.pc).path
    found = core_file.read(str(core_of("dies_by_stack_overflow")))
    assert [thread.tid for thread in found.threads] == [found.pid]
    assert mapped_at(found, found.threads[0].pc).path.endswith("libdefects.so")


@pytest.mark.parametrize("percent", [10, 40, 90])
def test_a_core_that_was_cut_off_tells_as_much(core: Path, copy: Path, percent: int) -> None:
    whole = core_file.read(str(core))
    os.truncate(copy, whole.size_bytes * percent // 100)
    found = core_file.read(str(copy))
    assert (found.truncated, found.size_bytes) == (True, whole.size_bytes * percent // 100)
    assert found.execfn in ("", whole.execfn)
    as_if_whole = {"truncated": False, "size_bytes": whole.size_bytes, "execfn": whole.execfn}
    assert dataclasses.replace(found, **as_if_whole) == whole  # type: ignore[arg-type]


def test_wherever_its_notes_are_cut_off_what_is_told_is_right(core: Path, copy: Path) -> None:
    whole, reported = core_file.read(str(core)), 0
    reasons = set()
    for size in range(notes_end(core), 0, -11):
        os.truncate(copy, size)
        try:
            found = core_file.read(str(copy))
        except NotACore as refusal:
            reasons.add(str(refusal).partition(":")[0])
            continue
        reported += 1
        assert found.truncated
        assert (found.pid, found.signal, found.threads) == (whole.pid, whole.signal, whole.threads)
        assert found.files in ((), whole.files)
    assert reported > 10
    assert reasons == {
        "damaged, or truncated before the end of its notes",
        "damaged or truncated in its first 20 bytes",
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"Traceback (most recent call last)", "not a core: no ELF header"),
        (b"\x7fELF\x02\x01\x01", "truncated"),
        (b"\x7fELF\x07\x01\x01" + bytes(99), "damaged"),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\4\0\x3e\0" + bytes(400), "damaged"),
    ],
    ids=["empty", "a log", "seven bytes", "not of 32 or 64 bits", "zeros"],
)
def test_what_is_no_core_says_what_it_is(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "core").write_bytes(content)
    assert why in why_not(tmp_path / "core")


def test_a_program_is_not_a_core(tmp_path: Path) -> None:
    assert why_not(Path(os.path.realpath(sys.executable))).startswith("not a core, but a program")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent"):
        with pytest.raises(OSError, match=r"not a regular file|No such file"):
            core_file.read(str(path))


@pytest.mark.parametrize(
    ("at", "data", "name"),
    [
        (_MACHINE, struct.pack("<H", 21), "ppc64, 64 bits, little endian"),
        (_MACHINE, struct.pack("<H", 40_000), "machine 40000, 64 bits"),
        (4, b"\1", f"{os.uname().machine}, 32 bits"),
        (5, b"\2\1" + bytes(9) + struct.pack(">HH", 4, 22), "s390, 64 bits, big endian"),
    ],
    ids=["ppc64le", "unknown", "32 bits", "big endian"],
)
def test_a_core_of_another_machine_is_not_called_damaged(copy: Path, at: int, data: bytes, name: str) -> None:
    patch(copy, at, data)
    assert why_not(copy).startswith(f"a core of an unsupported machine: {name}")
    with pytest.raises(OtherMachine):
        core_file.read(str(copy))


def note(kind: int, content: bytes) -> bytes:
    return struct.pack("<III8s", 5, len(content), kind, b"CORE") + content + bytes(-len(content) % 4)


def small_core(machine: int, content: bytes) -> bytes:
    """A core of one segment of notes, as elf(5) describes it."""
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 4, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 4, 0, 120, 0, 0, len(content), 0, 4) + content


def test_a_core_of_aarch64_has_its_program_counter_elsewhere() -> None:
    registers = struct.pack("<34Q", *range(31), 0x7FF0, 0x4444, 0)  # x0 to x30, sp, pc, pstate
    state = struct.pack("<12xh18xi76x", 11, 42) + registers + bytes(8)
    about = struct.pack("<16xI4xi12x16s80s", 1000, 41, b"python", b"python train.py ")
    found = core_file.read(small_core(183, note(1, state) + note(3, about)))
    assert (found.machine, found.pid, found.uid, found.arguments) == ("aarch64", 41, 1000, "python train.py")
    assert found.threads == (core_file.CoreThread(42, 11, 0x4444),)
    # gdb's gcore writes no siginfo
    assert (found.signal, found.code, found.address, found.files, found.execfn) == (11, None, None, (), "")


def test_an_address_that_the_processor_does_not_tell_is_none(copy: Path) -> None:
    # GIVEN a fault at an address that is not canonical, as x86-64 reports it: SI_KERNEL, address 0
    with elf.File(str(copy)) as file:
        siginfo = next(one for one in Image(file).notes() if one.kind == 0x53494749)
    patch(copy, siginfo.offset + 8, struct.pack("<iiQ", 128, 0, 0))
    found = core_file.read(str(copy))
    assert (found.signal, found.code, found.address, found.sender_pid) == (11, 128, None, None)


def test_more_mappings_than_the_header_can_count_are_counted_elsewhere(core: Path, copy: Path) -> None:
    # GIVEN a core in the kernel's form for 65,535 mappings and more: their number is in a section at its end
    whole = core_file.read(str(core))
    (count,) = struct.unpack_from("<H", core.read_bytes(), _SEGMENT_COUNT)
    with copy.open("ab") as file:
        file.write(struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 1, 0, count, 0, 0))
    patch(copy, _SECTIONS_AT, struct.pack("<Q", whole.size_bytes))
    patch(copy, _SEGMENT_COUNT, b"\xff\xff")
    assert dataclasses.replace(core_file.read(str(copy)), size_bytes=whole.size_bytes) == whole
    # WHEN that section is cut off THEN the place of the notes tells it
    os.truncate(copy, whole.size_bytes)
    assert core_file.read(str(copy)) == whole


def test_mappings_may_come_in_any_order(core: Path, copy: Path) -> None:
    data = core.read_bytes()
    (count,) = struct.unpack_from("<H", data, _SEGMENT_COUNT)
    at = [_HEADER_BYTES + i * _SEGMENT_BYTES for i in range(1, count)]  # behind that of the notes
    rows = [data[start : start + _SEGMENT_BYTES] for start in at]
    rows.sort(key=lambda row: int.from_bytes(row[32:40], "little"))  # by size, as with kernel.core_sort_vma=1
    patch(copy, at[0], b"".join(rows))
    whole = core_file.read(str(core))
    assert core_file.read(str(copy)) == whole
    assert len(core_file.build_ids(str(core), whole)) > 3
    assert core_file.build_ids(str(copy), whole) == core_file.build_ids(str(core), whole)


@pytest.fixture(scope="module")
def head(core: Path) -> bytes:
    """The headers, notes and first pages of a core."""
    with core.open("rb") as file:
        return file.read(notes_end(core) + (64 << 10))


@each("seed", range(300))
def test_damage_is_told_or_does_not_matter(head: bytes, seed: int) -> None:
    # GIVEN the beginning of a core, with some bytes replaced, and sometimes cut off
    chance = random.Random(seed)
    data = bytearray(head)
    fields = [0, 255, 127, 128]
    for _ in range(chance.choice((1, 1, 4, 40))):
        at = chance.randrange(chance.choice((64, 512, 8192, len(data))))
        width = chance.choice((1, 2, 4, 8))
        data[at : at + width] = bytes([chance.choice([*fields, chance.randrange(256)])]) * width
    data = data[: chance.choice((len(data), chance.randrange(len(data))))]
    # WHEN it is read THEN it is read or refused, and nothing else
    with contextlib.suppress(NotACore):
        found = core_file.read(bytes(data))
        core_file.changed_files(bytes(data), found)
        core_file.missing_files(bytes(data), found)


def test_no_number_in_a_core_makes_us_wait_or_fill_the_memory(tmp_path: Path) -> None:
    lies = [
        small_core(62, note(0x46494C45, struct.pack("<QQ", 2**60, 4096))),
        small_core(62, note(1, bytes(336)) + note(3, bytes(136)) + note(0x46494C45, struct.pack("<QQ", 2**61, 1))),
        small_core(62, struct.pack("<III8s", 5, 2**32 - 1, 1, b"CORE")),
        small_core(62, b"")[:56] + struct.pack("<HHHHQQQQ", 2**16 - 2, 0, 0, 0, 4, 120, 0, 0) + bytes(2**22),
    ]
    tracemalloc.start()
    try:
        for content in lies:
            with pytest.raises(NotACore, match="damaged"):
                core_file.read(content)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    # GIVEN a file of 1 TiB with notes of nothing up to its end
    path = tmp_path / "core"
    path.write_bytes(small_core(62, b"")[:96] + struct.pack("<Q", 2**40) + bytes(64))
    os.truncate(path, 1 << 40)
    began = time.process_time()  # what others on this machine do does not count
    assert "damaged" in why_not(path)
    assert time.process_time() - began < 5


def test_a_library_that_was_rebuilt_since_is_told(core_of: CoreOf, folder: Path) -> None:
    path = str(core_of("dies_by_stack_overflow"))
    library = folder / "libdefects.so"
    found = core_file.read(path)
    # GIVEN all libraries as they were
    built = elf.read(str(library))
    assert built is not None
    assert built.build_id
    assert core_file.build_ids(path, found)[str(library)] == built.build_id
    assert (core_file.changed_files(path, found), core_file.missing_files(path, found)) == ((), ())
    kept = library.read_bytes()
    try:
        # WHEN another is built in the place of one THEN it is named, also if that was before the crash
        need("gcc")
        options = ["-shared", "-fPIC", "-Wl,--build-id", "-x", "c", "-o", str(library), "-"]
        subprocess.run(["gcc", *options], input="int other(void) { return 1; }", text=True, check=True)
        renamed = [(file, f"{file.path} (deleted)" if "defects" in file.path else file.path) for file in found.files]
        before = dataclasses.replace(found, files=tuple(dataclasses.replace(file, path=path) for file, path in renamed))
        assert core_file.changed_files(path, found) == core_file.changed_files(path, before) == (str(library),)
        assert core_file.missing_files(path, found) == core_file.missing_files(path, before) == ()
        # WHEN there is none any more THEN it is not changed, but missing
        library.unlink()
        assert (core_file.changed_files(path, found), core_file.missing_files(path, found)) == ((), (str(library),))
        assert (core_file.changed_files(path, before), core_file.missing_files(path, before)) == ((), (str(library),))
    finally:
        library.write_bytes(kept)


def pack(core: Path, packing: packed_files.Packing, folder: Path) -> Path:
    """Pack a file under a name that says nothing, behind a link."""
    need(packing.value)
    path = folder / "-packed"
    with path.open("wb") as file:
        subprocess.run([*PACK[packing], str(core)], stdout=file, check=True, timeout=60)
    (folder / "link").symlink_to(path)
    return folder / "link"


@pytest.mark.parametrize("packing", PACK)
def test_a_packed_core_is_read_and_unpacked(core: Path, tmp_path: Path, packing: packed_files.Packing) -> None:
    path = pack(core, packing, tmp_path)
    assert (packed_files.packing_of(str(path)), packed_files.packing_of(str(core))) == (
        packing,
        packed_files.Packing.NONE,
    )
    (tmp_path / "new").mkdir()
    unpacked, error = stored_cores.unpack(str(path), str(tmp_path / "new"), most_bytes=1 << 30, timeout_s=30)
    assert (Path(unpacked).parent, error) == (tmp_path / "new", None)
    assert Path(unpacked).read_bytes() == core.read_bytes()


@pytest.mark.parametrize("packing", PACK)
def test_what_cannot_be_unpacked_says_why_and_has_its_beginning(
    core: Path, tmp_path: Path, packing: packed_files.Packing
) -> None:
    path = pack(core, packing, tmp_path)
    folder = tmp_path / "new"
    folder.mkdir()

    def refused() -> str:
        unpacked, error = stored_cores.unpack(str(path), str(folder), most_bytes=1 << 30, timeout_s=30)
        assert core.read_bytes().startswith(Path(unpacked).read_bytes())
        Path(unpacked).unlink()
        return str(error)

    size = path.stat().st_size
    for kept in (size - 1, size * 2 // 3, size // 3):
        os.truncate(path, kept)
        assert refused() == "this file is truncated"
    os.truncate(path, 12)
    with pytest.raises(packed_files.CutOff, match="this file is truncated"):
        refused()
    (folder / "core").unlink()
    path.write_bytes(path.read_bytes()[:8] + bytes(range(256)) * 8)
    try:
        _, error = stored_cores.unpack(str(path), str(folder), most_bytes=1 << 30, timeout_s=30)
    except packed_files.CannotUnpack as refusal:
        error = refusal
    assert str(error).startswith(("damaged: ", "this file is truncated"))


def test_what_does_not_fit_is_not_unpacked(core: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()

    def refused(most_bytes: int = 1 << 60) -> str:
        path = pack(copy, packed_files.Packing.ZSTD, tmp_path)
        unpacked, error = stored_cores.unpack(str(path), str(tmp_path / "new"), most_bytes=most_bytes, timeout_s=30)
        assert os.path.getsize(unpacked) < core.stat().st_size + (80 << 20)
        os.unlink(unpacked)
        os.unlink(tmp_path / "link")
        return str(error)

    os.truncate(copy, core.stat().st_size + (80 << 20))
    assert "damaged: it contains more than" in refused()
    assert "the limit is 1.0 MiB" in refused(most_bytes=1 << 20)
    patch(copy, _HEADER_BYTES + 32, struct.pack("<Q", 1 << 55))
    assert f"{tmp_path / 'new'} has " in refused()
    copy.write_bytes(b"Traceback (most recent call last)".ljust(20 << 20))
    assert refused() == "not a core: no ELF header"


@pytest.mark.parametrize(
    ("packing", "module"), [(packed_files.Packing.ZSTD, "zstandard"), (packed_files.Packing.LZ4, "lz4")]
)
def test_without_its_program_a_module_unpacks_it_or_is_asked_for(
    core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: packed_files.Packing, module: str
) -> None:
    path = pack(core, packing, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    if importlib.util.find_spec(module):
        assert stored_cores.unpack(str(path), str(tmp_path), most_bytes=1 << 30, timeout_s=30)[1] is None
    else:
        with pytest.raises(
            packed_files.CannotUnpack, match=f"{packing.value} is not installed: apt-get install {packing.value}"
        ):
            stored_cores.unpack(str(path), str(tmp_path), most_bytes=1 << 30, timeout_s=30)
