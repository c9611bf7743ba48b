"""GPU architectures of a compiled file, read from real nvcc output: always equal to nvcc's targets."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cuda_machines import Machine, judged
from support import need
from toolkit import compiled

from distdiag.facts import elf
from distdiag.facts.cuda import fatbin
from distdiag.facts.cuda.fatbin import Archs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KERNEL = 'extern "C" __global__ void {0}(float *x) {{ x[threadIdx.x] *= 2; }}'
_LAUNCHING = """
__global__ void inner(float *x) { x[threadIdx.x] *= 2; }
__global__ void outer(float *x) { inner<<<1, 32>>>(x); }
"""
_WITH_TABLE = """
__device__ char table[64 << 10] = {1};
__global__ void kernel(float *x) { x[threadIdx.x] *= table[threadIdx.x]; }
"""
_PLAIN = ("90", "90a", "121")
_HOSTILE = (0, 1, 16, 63, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_BLOB = 16
"""Bytes of the header of a fat binary: magic (4), version (2), size of the header (2), size of what follows (8)."""
_CODE_SIZE, _ARCH = 8, 28
"""Where an entry's header says how long its code is, and for which architecture."""


def code_for(cubins: Iterable[str] = (), ptx: Iterable[str] = ()) -> list[str]:
    """What to ask nvcc for."""
    asked = [("sm", arch) for arch in cubins] + [("compute", arch) for arch in ptx]
    return [f"-gencode=arch=compute_{arch},code={kind}_{arch}" for kind, arch in asked]


def read(path: Path) -> Archs:
    found = fatbin.archs(str(path))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fatbin")


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    """Every kind of architecture but families, and PTX of two; with as much code to a header as libraries have."""
    options = ["--no-compress", *code_for(_PLAIN, ["90a", "121"])]
    return compiled(folder / "library.so", _WITH_TABLE, *options)


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    return compiled(folder / "small.o", _KERNEL.format("small"), *code_for(["80", "90a"], ["90a"]))


def test_a_library_has_the_architectures_that_were_asked_for(library: Path) -> None:
    assert read(library) == Archs(cubins=_PLAIN, ptx=("90a", "121"), complete=True)


def test_a_stripped_library_has_them_still(library: Path, tmp_path: Path) -> None:
    need("strip")
    subprocess.run(["strip", "--strip-all", "-o", str(tmp_path / "stripped.so"), str(library)], check=True)
    assert read(tmp_path / "stripped.so") == read(library)


@pytest.fixture(scope="module")
def family(folder: Path) -> Path:
    options = ["--compress-mode=size", *code_for(["100f"], ["100f"])]
    return compiled(folder / "family.o", _KERNEL.format("family"), *options)


# Nothing is compressed in `library`.
def test_code_of_a_family_is_told_from_code_of_one_gpu_compressed_too(family: Path) -> None:
    assert read(family) == Archs(cubins=("100f",), ptx=("100f",), complete=True)


def test_a_library_of_ptx_alone_has_no_cubin_compressed_in_the_old_way_too(folder: Path) -> None:
    path = compiled(folder / "ptx.so", _KERNEL.format("kernel"), "-Xfatbin=-compress-all", *code_for(ptx=["80"]))
    assert read(path) == Archs(cubins=(), ptx=("80",), complete=True)


def test_an_object_to_be_linked_later_has_architectures_but_code_that_the_linker_can_change_is_none(
    folder: Path,
) -> None:
    codes = "-gencode=arch=compute_90,code=[sm_90,compute_90,lto_90]"
    path = compiled(folder / "relocatable.o", _LAUNCHING, "-rdc=true", codes)
    assert read(path) == Archs(cubins=("90",), ptx=("90",), complete=True)


@pytest.fixture(scope="module")
def linked(folder: Path) -> Path:
    """A library whose kernel starts a kernel: linked from NVIDIA's objects, which are for every GPU."""
    return compiled(folder / "linked.so", _LAUNCHING, "-rdc=true", *code_for(["80"]))


def test_a_library_does_not_run_where_only_the_parts_it_was_linked_from_would(linked: Path) -> None:
    assert "__nv_relfatbin" in {section.name for section in (elf.read(str(linked)) or pytest.fail("no ELF")).sections}
    assert read(linked) == Archs(cubins=("80",), ptx=(), complete=True)


def test_an_extension_without_code_for_the_gpu_is_named(
    linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "box")
    machine.driver("580.65.06", "NVIDIA GeForce RTX 5090:12.0", cuda=13000)
    machine.torch("2.13.0+cu130", "13.0", archs="75 80 86 90 100 120", seen=1)
    file = shutil.copy(linked, machine.python() / "flash_attn_2_cuda.so")
    machine.package("flash-attn", "2.8.3", ("flash_attn_2_cuda.so",))
    loose = machine.write(machine.folder / "checkout/ops/built.so", "")  # in no package: on PYTHONPATH
    shutil.copy(linked, loose)
    machine.env["PYTHONPATH"] = str(machine.folder / "checkout")
    facts = machine.examine(monkeypatch, "run")
    assert {one.path for one in facts.extensions} == {str(file), str(loose)}
    named = "flash-attn 2.8.3 has no code for the GPU of 12.0"
    finding = next(one for one in judged(facts, goal="run").findings if named in one.title)
    assert f"{file}: code for 8.0" in finding.evidence[0]
    assert finding.fix is not None
    assert finding.fix.commands[0].startswith('TORCH_CUDA_ARCH_LIST="8.0;12.0"')


def test_a_library_has_the_architectures_of_all_its_objects(folder: Path, small: Path, family: Path) -> None:
    need("g++")
    path = folder / "both.so"
    argv = ["g++", "-shared", "-Wl,--unresolved-symbols=ignore-all", "-o", str(path), str(small), str(family)]
    subprocess.run(argv, check=True, timeout=60)
    assert read(path) == Archs(cubins=("80", "90a", "100f"), ptx=("90a", "100f"), complete=True)


def test_a_program_without_gpu_code_has_none(tmp_path: Path) -> None:
    need("gcc")
    (tmp_path / "host.c").write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-o", str(tmp_path / "host"), str(tmp_path / "host.c")], check=True, timeout=60)
    assert read(tmp_path / "host") == Archs(cubins=(), ptx=(), complete=True)
    assert fatbin.archs(str(tmp_path / "host.c")) is None


def test_without_section_headers_nothing_is_known(library: Path, tmp_path: Path) -> None:
    data = bytearray(library.read_bytes())
    data[0x28:0x30] = bytes(8)  # e_shoff
    data[0x3C:0x40] = bytes(4)  # e_shnum, e_shstrndx
    (tmp_path / "bare.so").write_bytes(data)
    assert read(tmp_path / "bare.so") == Archs(cubins=(), ptx=(), complete=False)


class Copy:
    """A copy of a real object whose fat binary a test damages; it holds cubins of 80, 90a, then PTX of 90a."""

    def __init__(self, original: Path, path: Path) -> None:
        self.path = path
        self.data = bytearray(original.read_bytes())
        found = elf.read(str(original))
        assert found is not None
        self.section = next(section for section in found.sections if section.name == ".nv_fatbin")
        self.first = self.section.offset + _BLOB
        header, code = struct.unpack_from("<IQ", self.data, self.first + 4)
        self.second = self.first + header + code

    def read_with(self, form: str, at: int, value: int) -> Archs:
        """The result with one number changed; the number is restored."""
        damaged = bytearray(self.data)
        struct.pack_into(form, damaged, at, value)
        self.path.write_bytes(damaged)
        return read(self.path)

    def extended(self, pieces: Callable[[], Iterable[bytes]], size: int) -> None:
        """Let the section be `size` bytes of something else, behind the end of the file."""
        (headers,) = struct.unpack_from("<Q", self.data, 0x28)
        for at in range(headers, len(self.data) - 63, 64):
            if struct.unpack_from("<QQ", self.data, at + 24) == (self.section.offset, self.section.size):
                struct.pack_into("<QQ", self.data, at + 24, len(self.data), size)
        with self.path.open("wb") as file:
            file.write(self.data)
            file.writelines(pieces())
            file.truncate(len(self.data) + size)


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Copy:
    return Copy(small, tmp_path / "copy.o")


@pytest.mark.parametrize("size", [0, 2**40, 2**64 - 1])
def test_a_wrong_size_of_code_hides_what_comes_after_and_that_is_said(copy: Copy, size: int) -> None:
    found = copy.read_with("<Q", copy.second + _CODE_SIZE, size)
    assert found.cubins[:1] == ("80",)
    assert not found.complete


@pytest.mark.parametrize("arch", [0, 2**32 - 1])
def test_what_is_no_architecture_is_not_listed(copy: Copy, arch: int) -> None:
    assert copy.read_with("<I", copy.second + _ARCH, arch) == Archs(("80",), (), complete=False)


def test_a_fat_binary_longer_than_its_section_is_not_complete(copy: Copy) -> None:
    assert copy.read_with("<Q", copy.section.offset + 8, 2**63) == Archs(("80", "90a"), ("90a",), complete=False)


def test_something_else_in_place_of_a_fat_binary_is_not_complete(copy: Copy) -> None:
    assert copy.read_with("<I", copy.section.offset, 0x464C457F) == Archs((), (), complete=False)


def test_an_empty_fat_binary_is_complete(copy: Copy) -> None:
    copy.extended(lambda: [struct.pack("<IHHQ", 0xBA55ED50, 1, _BLOB, 0)], _BLOB)
    assert read(copy.path) == Archs((), (), complete=True)


def test_zeros_between_fat_binaries_are_skipped(copy: Copy) -> None:
    blob = bytes(copy.data[copy.section.offset : copy.section.offset + copy.section.size])
    copy.extended(lambda: [blob, bytes(24), blob], 2 * len(blob) + 24)
    assert read(copy.path) == Archs(("80", "90a"), ("90a",), complete=True)


@pytest.mark.parametrize("piece", [struct.pack("<IHHQ", 0xBA55ED50, 1, _BLOB, 0), bytes(1)], ids=["empty", "zeros"])
def test_a_section_without_an_end_is_given_up(copy: Copy, piece: bytes) -> None:
    copy.extended(lambda: [piece * (1 << 20)], 1 << 40)
    began = time.process_time()
    assert read(copy.path) == Archs((), (), complete=False)
    assert time.process_time() - began < 10


def test_no_number_in_a_fat_binary_makes_us_fail_or_wait(copy: Copy) -> None:
    began = time.process_time()
    for at in range(copy.section.offset, copy.section.offset + 96, 4):
        for value in _HOSTILE:
            copy.read_with("<Q", at, value)
    for at in range(copy.second, copy.second + 64, 4):
        for value in _HOSTILE:
            copy.read_with("<Q", at, value)
    assert time.process_time() - began < 20


def test_of_a_large_library_little_is_read(library: Path, tmp_path: Path) -> None:
    # GIVEN real fat binaries, one after the other, as of hundreds of objects for several GPUs each
    copy = Copy(library, tmp_path / "large.so")
    blob = bytes(copy.data[copy.section.offset : copy.section.offset + copy.section.size])
    count = (1 << 27) // len(blob)
    copy.extended(lambda: (blob for _ in range(count)), count * len(blob))
    # WHEN its architectures are read
    before, began = bytes_read(), time.process_time()
    assert read(copy.path) == read(library)
    # THEN only the pages of its headers were read, a quarter: some 3,000, in 0.02 s
    assert bytes_read() - before < 1 << 26
    assert time.process_time() - began < 1


def bytes_read() -> int:
    """What this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
