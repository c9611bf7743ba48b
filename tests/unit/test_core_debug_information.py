"""Whether a program or library has debug information, in itself or beside it."""

from __future__ import annotations

import os
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest
from support import need

from distdiag.node import elf
from distdiag.node.core import gdb
from distdiag.node.core.unwinder import has_debug_information

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CODE = "double step(double value) { return value * 3; }"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    need("gcc", "objcopy", "strip")

    def built(*options: str, name: str = "libcode.so") -> Path:
        folder = tmp_path_factory.mktemp("built")
        (folder / "code.c").write_text(CODE)
        command = ["gcc", "-fPIC", *options, "-o", name, "code.c"]
        subprocess.run(command, cwd=folder, check=True)
        return folder / name

    return built


def test_debug_information_beside_the_file_is_found(build: Callable[..., Path]) -> None:
    path = build("-shared", "-g")
    assert has_debug_information(str(path))
    debug = path.parent / "aside.debug"
    subprocess.run(["objcopy", "--only-keep-debug", path, debug], check=True)
    subprocess.run(["strip", path], check=True)
    assert not has_debug_information(str(path))
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug}", path], check=True)
    for place in (debug, debug.parent / ".debug" / debug.name):
        place.parent.mkdir(exist_ok=True)
        debug = debug.rename(place)
        assert has_debug_information(str(path))


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


def test_what_is_no_library_has_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library")
    assert not has_debug_information(str(tmp_path / "text"))
    assert not has_debug_information(str(tmp_path / "not there"))


def test_a_name_that_looks_like_an_option_is_a_file(
    build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    need("gdb", "nm")
    path = build("-shared", "-g")
    named = path.rename(path.with_name("--eval-command=shell touch harmed"))
    monkeypatch.chdir(path.parent)
    symbols = subprocess.run(["nm", f"./{named.name}"], capture_output=True, text=True, check=True).stdout
    address = next(int(row.split()[0], 16) for row in symbols.splitlines() if row.endswith(" step"))
    ((file, line),) = gdb.source_lines({named.name: [address]}, timeout_s=30).values()
    assert (os.path.basename(file), line) == ("code.c", 1)
    assert not (path.parent / "harmed").exists()
