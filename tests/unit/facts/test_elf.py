"""An ELF file is read like readelf, regardless of its size and claims."""

from __future__ import annotations

import os
import struct
import subprocess
import time
import tracemalloc
from pathlib import Path

import pytest
from support import need

from distdiag.facts import elf

_MACHINE, _SECTIONS_AT, _SEGMENT_COUNT, _SECTION_COUNT = 0x12, 0x28, 0x38, 0x3C  # in the header of the file, elf(5)
_HOSTILE = (0, 1, 64, 4096, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def link(output: Path, *options: str, source: str = "int answer(void) { return 42; }") -> Path:
    need("gcc")
    output.with_suffix(".c").write_text(source)
    subprocess.run(["gcc", *options, "-o", str(output), str(output.with_suffix(".c"))], check=True, timeout=60)
    return output


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = [
        "-shared",
        "-fPIC",
        "-g",
        "-Wl,-soname,libanswer.so.4",
        "-Wl,--build-id=0x0123456789abcdef",
        "-Wl,--no-as-needed",
    ]
    folders = ["-Wl,--enable-new-dtags", "-Wl,-rpath,$ORIGIN/../lib:/opt/answers"]
    return link(tmp_path_factory.mktemp("elf") / "libanswer.so", *options, *folders, "-lm")


def read(path: Path) -> elf.Elf:
    found = elf.read(str(path))
    assert found is not None
    return found


def without_sections(found: elf.Elf) -> tuple[object, ...]:
    return found.machine, found.soname, found.needed, found.rpath, found.runpath, found.build_id


def test_a_library_says_what_it_is_and_what_it_needs(library: Path) -> None:
    found = read(library)
    assert without_sections(found) == (
        os.uname().machine,
        "libanswer.so.4",
        ("libm.so.6", "libc.so.6"),
        (),
        ("$ORIGIN/../lib", "/opt/answers"),
        "0123456789abcdef",
    )
    text = next(section for section in found.sections if section.name == ".text")
    assert 0 < text.offset < text.offset + text.size < library.stat().st_size
    assert ".bss" not in {section.name for section in found.sections}  # it has no bytes in the file


def test_rpath_is_not_runpath(tmp_path: Path) -> None:
    path = link(tmp_path / "libold.so", "-shared", "-fPIC", "-Wl,--disable-new-dtags", "-Wl,-rpath,/opt/old")
    found = read(path)
    assert (found.rpath, found.runpath, found.soname) == (("/opt/old",), (), "")


def test_a_stripped_library_says_the_same(library: Path, tmp_path: Path) -> None:
    need("strip")
    path = tmp_path / "stripped.so"
    subprocess.run(["strip", "--strip-all", "-o", str(path), str(library)], check=True)
    assert without_sections(read(path)) == without_sections(read(library))
    assert {section.name for section in read(path).sections} < {section.name for section in read(library).sections}


def test_a_library_without_section_headers_says_the_same(library: Path, tmp_path: Path) -> None:
    data = bytearray(library.read_bytes())
    (headers,) = struct.unpack_from("<Q", data, _SECTIONS_AT)
    data[_SECTIONS_AT : _SECTIONS_AT + 8] = bytes(8)
    data[_SECTION_COUNT : _SECTION_COUNT + 4] = bytes(4)
    path = tmp_path / "bare.so"
    path.write_bytes(data[:headers])
    assert without_sections(read(path)) == without_sections(read(library))
    assert read(path).sections == ()


def test_a_file_of_debug_information_has_the_build_id_of_its_library(library: Path, tmp_path: Path) -> None:
    need("objcopy")
    path = tmp_path / "libanswer.debug"
    subprocess.run(["objcopy", "--only-keep-debug", str(library), str(path)], check=True)
    found = read(path)
    assert (found.build_id, found.needed) == ("0123456789abcdef", ())
    names = {section.name for section in found.sections}
    assert ".debug_info" in names
    assert ".text" not in names


def test_so_has_one_whose_program_headers_are_those_of_its_library(library: Path, tmp_path: Path) -> None:
    # GIVEN a debug file made by eu-strip (Fedora, RHEL): its sections have no bytes
    need("objcopy")
    path = tmp_path / "libanswer.debug"
    subprocess.run(["objcopy", "--only-keep-debug", str(library), str(path)], check=True)
    headers = slice(64, 64 + 56 * struct.unpack_from("<H", library.read_bytes(), _SEGMENT_COUNT)[0])
    data = bytearray(path.read_bytes())
    data[headers] = library.read_bytes()[headers]
    path.write_bytes(data)
    # THEN they are not asked
    assert (read(path).build_id, read(path).needed) == ("0123456789abcdef", ())


def test_an_object_is_not_linked_yet(tmp_path: Path) -> None:
    found = read(link(tmp_path / "answer.o", "-c"))
    assert without_sections(found) == (os.uname().machine, "", (), (), (), "")
    assert ".text" in {section.name for section in found.sections}


def test_an_object_may_have_more_sections_than_its_header_can_count(tmp_path: Path) -> None:
    need("as")
    source = tmp_path / "many.s"
    source.write_text("".join(f".section .many.{i}\n.byte 1\n" for i in range(66_000)))
    path = tmp_path / "many.o"
    subprocess.run(["as", "-o", str(path), str(source)], check=True, timeout=60)
    names = [section.name for section in read(path).sections]
    assert sum(name.startswith(".many.") for name in names) == 66_000


def test_the_machine_is_named_as_uname_names_it(library: Path, tmp_path: Path) -> None:
    data = bytearray(library.read_bytes())
    path = tmp_path / "other.so"
    machines = {}
    for number in (62, 183, 21):  # EM_X86_64, EM_AARCH64, EM_PPC64
        struct.pack_into("<H", data, _MACHINE, number)
        path.write_bytes(data)
        found = elf.read(str(path))
        machines[number] = found and found.machine
    assert machines == {62: "x86_64", 183: "aarch64", 21: None}


def test_what_this_program_has_loaded_reads_as_readelf_reads_it() -> None:
    need("readelf")
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    assert loaded
    for path in loaded:
        found = read(Path(path))
        said = subprocess.run(["readelf", "-dnW", path], capture_output=True, text=True, check=True).stdout
        lines = [line.partition(" [") for line in said.splitlines()]
        assert [rest.rstrip("]") for head, _, rest in lines if "(NEEDED)" in head] == list(found.needed)
        assert [rest.rstrip("]") for head, _, rest in lines if "(SONAME)" in head] == [found.soname][
            : bool(found.soname)
        ]
        # Not every library has one.
        assert found.build_id == next(
            (rest for _, _, rest in (line.partition("Build ID: ") for line in said.splitlines()) if rest), ""
        )


def test_the_size_of_a_file_costs_nothing(library: Path, tmp_path: Path) -> None:
    path = tmp_path / "huge.so"
    path.write_bytes(library.read_bytes())
    os.truncate(path, 1 << 40)
    began = time.process_time()
    assert read(path) == read(library)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF",
        b"#!/bin/sh\n",
        b"\0" * 4096,
        b"\x7fELF\x01\x01\x01" + b"\0" * 4096,
        b"\x7fELF\x02\x02\x01" + b"\0" * 99,
    ],
    ids=["empty", "four bytes", "script", "zeros", "32 bits", "big endian"],
)
def test_what_is_no_such_file_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert elf.read(str(tmp_path / "file")) is None


def test_what_is_no_file_is_none_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent", tmp_path / "no\0path", "/dev/zero", ""):
        assert elf.read(str(path)) is None


def test_a_file_that_was_cut_off_is_none(library: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.so"
    path.write_bytes(library.read_bytes())
    for size in range(library.stat().st_size - 1, 0, -61):
        os.truncate(path, size)
        assert elf.read(str(path)) is None


def test_no_number_in_a_file_makes_us_fail_or_wait(library: Path, tmp_path: Path) -> None:
    # GIVEN a library with any one number of its headers and tables replaced
    data = library.read_bytes()
    dynamic = next(section for section in read(library).sections if section.name == ".dynamic")
    (headers,) = struct.unpack_from("<Q", data, _SECTIONS_AT)
    path = tmp_path / "hostile.so"
    path.write_bytes(data)
    began = time.process_time()
    with path.open("r+b", buffering=0) as file:
        for start, end in ((0, 640), (dynamic.offset, dynamic.offset + dynamic.size), (headers, len(data))):
            for at in range(start, end, 8):
                for value in _HOSTILE:
                    os.pwrite(file.fileno(), struct.pack("<Q", value), at)
                    # WHEN it is read THEN nothing is raised
                    elf.read(str(path))
                os.pwrite(file.fileno(), data[at : at + 8], at)
    assert elf.read(str(path)) == elf.read(str(library))
    assert time.process_time() - began < 20


def test_sections_that_share_one_long_name_do_not_fill_the_memory(tmp_path: Path) -> None:
    # GIVEN 20,000 sections that all claim the same name of 60,000 letters
    count, name = 20_000, b"x" * 60_000 + b"\0"
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 1, 62, 1, 0, 0, 64, 0, 64, 56, 0, 64, 0, 1)
    first = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, count, 0, 0, 0, 0)
    other = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64 + count * 64, len(name), 0, 0, 1, 0)
    path = tmp_path / "names.o"
    path.write_bytes(header + first + other * (count - 1) + name)
    tracemalloc.start()
    try:
        # WHEN it is read THEN that is refused, and was not tried
        assert elf.read(str(path)) is None
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
