"""Damaged files: a reader always answers in time, and only the damaged file is lost."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import support_torch
from cores import make_core
from fuzz import MEMORY_BYTES, PER_READER, SECONDS, assert_survived, damaged, run_each
from logs_cases import cases
from support import need
from support_warm import distdiag

from distdiag.cluster import hostfile, hostlist, hosts
from distdiag.cluster.transports import ssh_config
from distdiag.cluster.transports.known_hosts import KnownHosts
from distdiag.errors import DistdiagError
from distdiag.facts import elf, packed_files
from distdiag.facts.core import core_file, stored_cores
from distdiag.facts.core.core_file import NotACore
from distdiag.facts.cuda import fatbin
from distdiag.facts.network import sockets
from distdiag.facts.recorder import line_trace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

RECORDED = Path(__file__).parents[2] / "recorded"
END_TO_END = 6
"""Of what takes a process each, so many are run as a user would."""


def survives(read: Callable[[], object], *refuses: type[Exception]) -> str:
    """Return the violation in its end; empty if it returned a result, or refused with its documented error."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read()
    except refuses:
        pass
    except BaseException:  # noqa: BLE001 - whatever comes out here is what the test is about
        return traceback.format_exc()[-1500:]
    took = time.monotonic() - began
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return f"{took:.0f} s, +{grown} B" if took > SECONDS or grown > MEMORY_BYTES else ""


def each(originals: Iterable[bytes], read: Callable[[bytes], object], *refuses: type[Exception]) -> None:
    """Read PER_READER damaged pieces of these, in turn."""
    pieces = [damaged(original, PER_READER, seed=number) for number, original in enumerate(originals)]
    wrong = []
    for name, data in itertools.islice(itertools.chain.from_iterable(zip(*pieces, strict=True)), PER_READER):
        if said := survives(lambda data=data: read(data), *refuses):  # type: ignore[misc]
            wrong.append(f"{name}: {said}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:5])


def as_file(path: Path, read: Callable[[str], object]) -> Callable[[bytes], object]:
    def with_bytes(data: bytes) -> object:
        path.write_bytes(data)
        return read(str(path))

    return with_bytes


def commands(
    originals: Iterable[bytes], path: Path, *arguments: str
) -> Iterator[tuple[str, list[str], Callable[[], None]]]:
    pieces = [damaged(original, PER_READER, seed=number) for number, original in enumerate(originals)]
    for name, data in itertools.islice(itertools.chain.from_iterable(zip(*pieces, strict=True)), PER_READER):
        yield name, [*arguments, str(path)], lambda data=data: path.write_bytes(data)  # type: ignore[misc]


def test_logs_of_strace(tmp_path: Path) -> None:
    names = ("6.13_files.txt", "6.1_comm.txt", "7.2_threads.txt", "7.2_threads_stderr.txt", "5.10_forks_relative.txt")
    originals = [(RECORDED / "strace" / name).read_bytes() for name in names]
    assert_survived(run_each(commands(originals, tmp_path / "x.log", "trace", "sys", "--from")))


def test_logs_of_strace_that_others_lie_beside(tmp_path: Path) -> None:
    (tmp_path / "good.log").write_bytes((RECORDED / "strace" / "6.13_files.txt").read_bytes())
    (tmp_path / "bad.log").write_bytes(b"\x00\xff" * 1000)
    document = distdiag(
        "trace", "sys", "--json", "--from", str(tmp_path / "good.log"), str(tmp_path / "bad.log")
    ).report
    (unread,) = [finding for finding in document["findings"] if "bad.log" in json.dumps(finding)]
    assert "not a strace log" in json.dumps(unread)
    assert "good.log" not in json.dumps(unread)
    assert document["data"]["threads"]


def test_logs_of_builds(tmp_path: Path) -> None:
    names = ("gcc_too_new.txt", "order.txt", "python_h_missing_coloured.txt", "flash_attn_gpu_too_old.txt")
    originals = [(RECORDED / "cuda_logs" / name).read_bytes() for name in names]
    facts = tmp_path / "facts"
    distdiag("cuda-env", "--save", str(facts))
    (saved,) = facts.iterdir()
    path = tmp_path / "x.log"
    assert_survived(run_each(commands(originals, path, "cuda-env", "--from", str(saved), "--explain")))


def test_logs_of_jobs(tmp_path: Path) -> None:
    chosen = ("torchrun-raise", "torchrun-restart", "wd-mismatch-size", "wd-wrapped", "ib-12", "srun-oom", "info-gdr")
    originals = [case.text for case in cases() if case.name in chosen]
    assert_survived(run_each(commands(originals, tmp_path / "x.log", "logs")))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rings")
    program = folder / "program.py"
    program.write_text("def step(n):\n    return n + 1\nfor number in range(99):\n    step(number)\n")
    argv = [sys.executable, "-m", "distdiag", "trace", "py", "--dir", str(folder / "kept"), "--", str(program)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    (found,) = (folder / "kept").glob("*.lines")
    return found


def test_rings_of_lines(ring: Path, tmp_path: Path) -> None:
    about = ring.read_bytes()
    small = about[: line_trace_file.PAGE] + about[line_trace_file.PAGE : line_trace_file.PAGE + 2**18]
    names = ring.with_suffix(line_trace_file.NAMES_SUFFIX).read_bytes()
    copy = tmp_path / ring.name
    (copy.with_suffix(line_trace_file.NAMES_SUFFIX)).write_bytes(names)
    each([about, small, about[:2000]], as_file(copy, line_trace_file.read), line_trace_file.NotARing)
    copy.write_bytes(about)
    each([names], as_file(copy.with_suffix(line_trace_file.NAMES_SUFFIX), lambda _: line_trace_file.read(str(copy))))


def test_rings_of_lines_as_the_command_reads_them(ring: Path, tmp_path: Path) -> None:
    copy = tmp_path / "kept" / ring.name
    copy.parent.mkdir()
    original, names = ring.read_bytes(), ring.with_suffix(line_trace_file.NAMES_SUFFIX).read_bytes()

    def cases() -> Iterator[tuple[str, list[str], Callable[[], None]]]:
        for number, ((name, data), (_, other)) in enumerate(
            zip(damaged(original[: line_trace_file.PAGE], END_TO_END), damaged(names, END_TO_END), strict=True)
        ):

            def prepare(data: bytes = data, other: bytes = other, number: int = number) -> None:
                copy.write_bytes(
                    data[: line_trace_file.PAGE].ljust(line_trace_file.PAGE, b"\0") + original[line_trace_file.PAGE :]
                )
                copy.with_suffix(line_trace_file.NAMES_SUFFIX).write_bytes(other if number % 2 else names)

            yield name, ["trace", "show", str(copy.parent)], prepare

    assert_survived(run_each(cases()), END_TO_END)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_core("dies_by_segv", tmp_path_factory.mktemp("cores"))


def test_cores(core: Path, tmp_path: Path) -> None:
    with open(core, "rb") as file:
        head = file.read(2**18)
    path = tmp_path / "core"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        found = core_file.read(str(path))
        return core_file.build_ids(str(path), found), core_file.changed_files(str(path), found)

    each([head], read, NotACore)


def test_cores_as_the_command_reads_them(core: Path, tmp_path: Path) -> None:
    original = core.read_bytes()
    path = tmp_path / "core.1"

    def cases() -> Iterator[tuple[str, list[str], Callable[[], None]]]:
        for name, data in damaged(original[: 2**16], END_TO_END):
            yield (
                name,
                ["core-bt", "--tool-timeout", "10", str(path)],
                lambda data=data: path.write_bytes(data[: 2**16] + original[2**16 :]),  # type: ignore[misc]
            )

    assert_survived(run_each(cases()), END_TO_END)


def test_packed_cores(core: Path, tmp_path: Path) -> None:
    need("gzip", "xz")
    with open(core, "rb") as file:
        plain = file.read(2**19)
    folder = tmp_path / "room"
    folder.mkdir()
    for ending, program in (("gz", "gzip"), ("xz", "xz")):
        original = subprocess.run([program, "-c"], input=plain, capture_output=True, check=True).stdout
        path = tmp_path / f"core.1.{ending}"

        def read(data: bytes, path: Path = path) -> None:
            path.write_bytes(data)
            if packed_files.packing_of(str(path)) is packed_files.Packing.NONE:
                return
            (folder / "core").unlink(missing_ok=True)
            stored_cores.unpack(str(path), str(folder), most_bytes=2**22, timeout_s=10)

        each([original], read, packed_files.CannotUnpack)


def test_programs_and_libraries(tmp_path: Path) -> None:
    need("gcc")
    source, library = tmp_path / "x.c", tmp_path / "libx.so"
    source.write_text("int answer(void) { return 42; }")
    subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-o", str(library), str(source), "-lm"], check=True)
    path = tmp_path / "y.so"
    each([library.read_bytes()], as_file(path, elf.read))
    each([library.read_bytes()], as_file(path, fatbin.archs))


def test_hostfiles() -> None:
    originals = [
        b"# ours\nnode[01-08] slots=8\ngpu1:4\nroot@gpu2 port=2222 # spare\n!node03\n",
        b"a port=22\nb user='x y'\nz=1\n",
    ]
    each(originals, lambda data: hostfile.read_hostfile(data.decode("utf-8", "replace"), "hosts"), DistdiagError)


@pytest.mark.parametrize(
    ("read", "original"),
    [
        (hosts.parse_hosts, b"node[08-11,20]-ib[0-1],gpu[1-9/2],[fe80::1]:22,user@h:8,!node09-ib0"),
        (hostlist.expand, b"n[1-3][00-09]x[1-9/3],tux,!n2[01-05]x4"),
        (hostfile.slurm_tasks, b"2(x2),1,16(x64)"),
        (hostfile.lsf_hosts, b"h1 4 h2 4 h3 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_host_lists(read: Callable[[str], object], original: bytes) -> None:
    each([original], lambda data: read(data.decode("utf-8", "replace")), DistdiagError)


def test_known_hosts(tmp_path: Path) -> None:
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIA" + "A" * 42
    original = (
        f"node1,10.0.0.1 ssh-ed25519 {key}\n[gpu*]:2222 ssh-ed25519 {key}\n@revoked * ssh-ed25519 {key}\n"
        f"|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= ssh-ed25519 {key}\n"
    ).encode()

    def judge(path: str) -> None:
        known = KnownHosts.read([path])
        for name, port in (("node1", 22), ("gpu7", 2222)):
            known.check(name, port, base64.b64decode(key))
            known.needs_openssh(name, port)

    each([original], as_file(tmp_path / "known_hosts", judge))


def test_configurations_of_ssh(tmp_path: Path) -> None:
    path = tmp_path / "config"
    original = (
        b"Include more\nHost a b*\n  HostName 10.0.0.%h\n  Port 2222\n  ProxyJump bastion\nMatch all\n User root\n"
    )
    each([original], as_file(path, ssh_config.depends_on_host), DistdiagError)


def test_names_of_sockets(tmp_path: Path) -> None:
    """Anybody may bind a socket to any name, and /proc/net/unix shows it as it is."""
    names = [b"\0" + data[:100] for _, data in damaged(b"0000000000000000: 00000002 1 1 4711 /x\n" * 2, 60)]
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(names):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):
                one.bind(name)
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
            text = file.read()
        assert one.fileno() >= 0
        inode = os.fstat(one.fileno()).st_ino
        assert inode in sockets.parse_unix(text)


_TENSORS = """
import os, signal, sys, tempfile
sys.path[:0] = {paths!r}
import torch
import test_hostile_files as here
from distdiag.commands.floatcmp import tensor_files
folder = tempfile.mkdtemp()
path = here.Path(folder, "x")
torch.save({{"a": torch.arange(64.0), "b": {{"c": torch.ones(3, 4, dtype=torch.int64)}}}}, path)
zipped = path.read_bytes()
torch.save({{"a": torch.arange(64.0)}}, path, _use_new_zipfile_serialization=False)
old = path.read_bytes()
npy = bytes.fromhex("934e554d505901007600") + str({{"descr": "<f4", "fortran_order": False, "shape": (4, 4)}}).encode()
npy = npy.ljust(127, b" ") + b"\\n" + bytes(64)
header = here.json.dumps({{"a": {{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}}}).encode()
safetensors = len(header).to_bytes(8, "little") + header + bytes(16)
part = here.Path(folder, "part.safetensors")
part.write_bytes(safetensors)
index = here.json.dumps({{"weight_map": {{"a": part.name}}}}).encode()
originals = {{"zipped": zipped, "old": old, "npy": npy, "safetensors": safetensors, "index": index}}
def late(*_):
    raise TimeoutError
signal.signal(signal.SIGVTALRM, late)
def survive(kind):
    path = here.Path(folder, "x.safetensors.index.json" if kind == "index" else f"x-{{kind}}")
    path.write_bytes(originals[kind])
    tensor_files.read(str(path))
    def read(path):
        # Torch searches its own message for names, in a time that is square in them; --timeout ends that for users.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.5 if kind == "old" else 0)
        try:
            return tensor_files.read(str(path))
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    refused = (tensor_files.Unreadable, *([TimeoutError] if kind == "old" else []))
    here.each([originals[kind]], here.as_file(path, read), *refused)
for kind in originals:
    pid = os.fork()  # the peak of memory is that of one kind
    if not pid:
        survive(kind)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"{{kind}} did not survive")
print("all of them")
"""


def test_files_of_tensors(tmp_path: Path) -> None:
    script, said = tmp_path / "reads.py", tmp_path / "said"
    here = Path(__file__).parent
    script.write_text(_TENSORS.format(paths=[str(here), str(here.parents[1])]))
    with said.open("wb") as output:
        argv, env = [sys.executable, str(script)], {**os.environ, "OMP_NUM_THREADS": "1"}
        process = support_torch.start(argv, env, output=output)
        assert process is not None
        status = process.wait(600)
    assert (status, said.read_text()[-2000:]) == (0, "all of them\n")
