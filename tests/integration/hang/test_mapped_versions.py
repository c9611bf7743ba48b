"""Versions of a process's mapped libraries: a real process with torch, and one with made-up libraries."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distdiag.facts.process import mapped_versions
from distdiag.knowledge.advisories import matching

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAPPER = (
    "import mmap, sys\n"
    "files = [open(path, 'rb') for path in sys.argv[1:]]\n"
    "held = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in files]\n"
    "print('ready', flush=True)\n"
    "input()\n"
)


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has libraries mapped as a rank of a GPU job has."""
    site = tmp_path / "site-packages"
    files = {
        "nvidia/nccl/lib/libnccl.so.2": b"\0" * (9 * 2**20) + b"NCCL version 2.29.2+cuda13.0\0",
        "torch/lib/libtorch_cpu.so": b"\x7fELF",
        "lib/libcuda.so.565.57.01": b"\x7fELF",
        "lib/libucp.so.0.0.0": b"x\x001.18.1\x00y",
        "lib/libnccl-net.so": b"NET/OFI Initializing aws-ofi-nccl 1.8.0-aws\0",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3": b"\0NVSHMEM v3.6.5\0",
        "deep_ep_cpp.cpython-312-x86_64-linux-gnu.so": b"\x7fELF",
    }
    (site / "deep_ep-1.2.1+309785a.dist-info").mkdir(parents=True)
    for name, content in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content.ljust(mmap.PAGESIZE, b"\0"))
    (site / "torch/version.py").write_text(
        "__version__ = '2.7.0+cu126'\ncuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n"
    )
    command = [sys.executable, "-c", MAPPER, *(str(site / name) for name in files)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_the_versions_of_a_rank_are_read_from_its_files(mapped: subprocess.Popen[bytes]) -> None:
    found = mapped_versions.read(mapped.pid)
    expected = {
        "nccl": "2.29.2+cuda13.0",
        "torch": "2.7.0+cu126",
        "cuda": "12.6",
        "driver": "565.57.01",
        "ucx": "1.18.1",
        "aws-ofi-nccl": "1.8.0",
        "nvshmem": "3.6.5",
        "deep-ep": "1.2.1",
        "kernel": os.uname().release,
        "arch": os.uname().machine,
        "python": platform.python_version(),
    }
    assert {name: found.versions.get(name) for name in expected} == expected
    assert found.sources["nccl"].endswith("/nvidia/nccl/lib/libnccl.so.2")
    ids = {advisory.id for advisory in matching(found.versions)}
    assert {"nccl-2.29.2", "torch-2.7.0-device-id", "driver-560-p2p", "ucx-shared-memory", "deepep-nvshmem"} <= ids


def test_the_versions_of_this_process_agree_with_what_it_says_of_itself() -> None:
    found = mapped_versions.read(os.getpid())
    assert found.versions["python"] == platform.python_version()
    assert found.versions["glibc"] == platform.libc_ver()[1]


def test_of_a_process_that_is_gone_only_the_machine_is_known() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    found = mapped_versions.read(process.pid)
    assert set(found.versions) == {"kernel", "arch"}
    assert found.error
