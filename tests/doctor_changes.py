"""One fact of one node changed for real, and doctor's expected report: for the test and the benchmark of doctor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import Names
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster import Network
    from cluster_netns import Node

    Making = Callable[[Network, Node], contextlib.AbstractContextManager[None]]

PROGRAMS = Path(__file__).parent / "programs"
OTHER_PYTHON = "/usr/bin/python3.11"
_SKEW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, now);
  if (!failed && clock == CLOCK_REALTIME) now->tv_sec += 30;
  return failed;
}
"""


@dataclass(frozen=True)
class Change:
    """A change; `ids`: findings that name it, any of them; `words`: what the title or the evidence must have."""

    make: Making
    ids: tuple[str, ...]
    words: str

    def named(self, report: dict[str, Any], host: str) -> bool:
        """Return whether a finding accuses this node alone, and names the fact."""
        for finding in report["findings"]:
            text = " ".join([finding["title"], *finding["evidence"]])
            plain = finding["id"].removeprefix("doctor.")
            if plain in self.ids and finding["where"]["hosts"] == [host] and self.words in text:
                return True
        return False


def started_by(*words: str) -> Making:
    """Put words before every command that is run on the node: a wrapper, or a variable."""

    @contextlib.contextmanager
    def make(_: Network, node: Node) -> Iterator[None]:
        file = node.folder / "enter"
        before = file.read_text()
        file.write_text(f"{before} {' '.join(words)}")
        try:
            yield
        finally:
            file.write_text(before)

    return make


def commands(*before: str, after: tuple[str, ...] = ()) -> Making:
    """Run shell commands on the node; HOME is its home, PYTHON the file of this Python."""

    @contextlib.contextmanager
    def make(_: Network, node: Node) -> Iterator[None]:
        names = {"HOME": str(node.home), "PYTHON": os.path.realpath(sys.executable), "TORCH": str(_torch_folder())}
        for line in before:
            node.run("sh", "-ec", line, env=names)
        try:
            yield
        finally:
            for line in after:
                node.run("sh", "-c", line, env=names, check=False)

    return make


def _torch_folder() -> Path:
    return next(Path(folder) / "torch" for folder in sys.path if (Path(folder) / "torch" / "version.py").exists())


@contextlib.contextmanager
def _skewed(network: Network, node: Node) -> Iterator[None]:
    source, library = node.folder / "skew.c", node.folder / "skew.so"
    source.write_text(_SKEW)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    with started_by(f"LD_PRELOAD={library}")(network, node):
        yield


@contextlib.contextmanager
def _dead_disk(_: Network, node: Node) -> Iterator[None]:
    folder, reported = node.folder / "dead", node.folder / "told"
    folder.mkdir(exist_ok=True)
    with reported.open("w") as output:
        server = node.start(sys.executable, str(PROGRAMS / "blocked_on_dead_disk.py"), str(folder), output=output)
    wait_until(lambda: "tids" in reported.read_text(), 20, reported.read_text)
    try:
        yield
    finally:
        for pid, line in node.processes().items():
            if "blocked_on_dead_disk" in line:
                os.kill(pid, 9)  # its end closes /dev/fuse, and waiting processes get an error
        server.wait(10)
        node.run("umount", "-l", str(folder), check=False)


@contextlib.contextmanager
def _own_name_is_loopback(network: Network, node: Node) -> Iterator[None]:
    before = (node.folder / "hosts").read_text()
    node.write_hosts(network.hosts_file(node, Names.DEBIAN))
    try:
        yield
    finally:
        node.write_hosts(before)


@contextlib.contextmanager
def _unplugged(_: Network, node: Node) -> Iterator[None]:
    node.unplug()
    try:
        yield
    finally:
        node.heal()


@contextlib.contextmanager
def _in_small_cgroup(network: Network, node: Node) -> Iterator[None]:
    """Cgroup v1 or v2, below the one of this test."""
    folder = _new_cgroup()
    limit = folder / ("memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes")
    limit.write_text(str(2 * 2**30))
    wrapper = node.folder / "in-cgroup"
    wrapper.write_text(f'#!/bin/sh\necho 0 >{folder}/cgroup.procs\nexec "$@"\n')
    wrapper.chmod(0o755)
    try:
        with started_by(str(wrapper))(network, node):
            yield
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), 20, lambda: "the cgroup is still in use")
        folder.rmdir()


def _new_cgroup() -> Path:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in lines if controllers == "memory"), None)
    root = Path("/sys/fs/cgroup/memory" if own is not None else "/sys/fs/cgroup")
    folder = root / f"distdiag-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder


def can_limit_memory() -> bool:
    """Return whether a cgroup of one's own can be made here."""
    try:
        folder = _new_cgroup()
        found = (folder / "memory.max").exists() or (folder / "memory.limit_in_bytes").exists()
        folder.rmdir()
    except OSError:
        return False
    return found


_OVER_HOME = ("umount -l $HOME",)
CHANGES: dict[str, Change] = {
    "memlock": Change(started_by("prlimit", "--memlock=65536:65536"), ("differs.limits",), "memlock limit"),
    "nofile": Change(started_by("prlimit", "--nofile=512:512"), ("nofile",), "512 files"),
    "nproc": Change(started_by("prlimit", "--nproc=500:500"), ("nproc",), "500 processes"),
    "core": Change(started_by("prlimit", "--core=1048576:1048576"), ("differs.limits",), "core limit"),
    "stack": Change(started_by("prlimit", "--stack=4194304:4194304"), ("differs.limits",), "stack limit"),
    "address-space": Change(started_by("prlimit", f"--as={16 * 2**30}"), ("differs.limits",), "address space limit"),
    "shm-size": Change(
        commands("mount -o remount,size=1G /dev/shm", after=("mount -o remount,size=50% /dev/shm",)),
        ("differs.shm",),
        "size of /dev/shm is 1 GiB",
    ),
    "shm-full": Change(
        commands(
            "mount -t tmpfs -o size=64M none /dev/shm && head -c 60M /dev/zero >/dev/shm/left",
            after=("umount /dev/shm",),
        ),
        ("shm",),
        "/dev/shm has 4 MiB of 64 MiB free",
    ),
    "clock": Change(_skewed, ("clock",), "30 s ahead"),
    "mtu": Change(
        commands("ip link set eth0 mtu 1300", after=("ip link set eth0 mtu 1500",)),
        ("differs.network",),
        "MTU of eth0 is 1300",
    ),
    "nic-down": Change(commands("ip link set eth0 down", after=("ip link set eth0 up",)), ("no-network",), "eth0"),
    "nic-unplugged": Change(_unplugged, ("nic-down",), "eth0"),
    "ports": Change(
        commands(
            "echo 40000 50000 >/proc/sys/net/ipv4/ip_local_port_range",
            after=("echo 32768 60999 >/proc/sys/net/ipv4/ip_local_port_range",),
        ),
        ("differs.network",),
        "40000-50000",
    ),
    "own-name": Change(_own_name_is_loopback, ("gloo-ifname",), "loopback"),
    "torch": Change(
        commands(
            "sed s/2.13.0/2.12.1/ $TORCH/version.py >$HOME/v.py && mount --bind $HOME/v.py $TORCH/version.py",
            after=("umount $TORCH/version.py",),
        ),
        ("differs.torch",),
        "2.12.1",
    ),
    "nccl": Change(
        commands(
            "site=$(dirname $TORCH); mkdir -p $HOME/w; mount -t tmpfs none $HOME/w; "
            "mkdir -p $HOME/w/u/nvidia_nccl_cu12-2.21.5.dist-info $HOME/w/w; "
            "mount -t overlay -o lowerdir=$site,upperdir=$HOME/w/u,workdir=$HOME/w/w none $site",
            after=("umount $(dirname $TORCH)", "umount -l $HOME/w"),
        ),
        ("differs.nccl",),
        "2.21.5",
    ),
    "python": Change(
        commands(f"mount --bind {OTHER_PYTHON} $PYTHON", after=("umount $PYTHON",)),
        ("differs.python",),
        "Python is 3.",
    ),
    "disk-full": Change(
        commands("mount -t tmpfs -o size=4M none $HOME && ! cat /dev/zero >$HOME/left 2>&-", after=_OVER_HOME),
        ("disk-full",),
        "is full",
    ),
    "inodes": Change(
        commands(
            "mount -t tmpfs -o size=4M,nr_inodes=4 none $HOME; cd $HOME; touch 1 2 3 4 5 2>&- || true",
            after=_OVER_HOME,
        ),
        ("inodes",),
        "0 of 4 inodes free",
    ),
    "read-only": Change(
        commands("mount -t tmpfs -o ro,size=4M none $HOME", after=_OVER_HOME), ("disk-read-only",), "is read-only"
    ),
    "hung-mount": Change(_dead_disk, ("mount-hung",), "dead hangs"),
    "cgroup-memory": Change(_in_small_cgroup, ("differs.memory",), "cgroup memory limit is 2 GiB"),
    "cpus": Change(started_by("taskset", "-c", "0"), ("differs.cpus",), "processors for the job is 1"),
    "variable": Change(started_by("NCCL_IB_DISABLE=1"), ("differs.environment",), "$NCCL_IB_DISABLE is 1"),
    "no-exec": Change(
        commands("mount -t tmpfs -o noexec,size=64M none $HOME", after=_OVER_HOME), ("noexec",), "is mounted noexec"
    ),
    "few-ports": Change(
        commands(
            "echo 40000 40999 >/proc/sys/net/ipv4/ip_local_port_range",
            after=("echo 32768 60999 >/proc/sys/net/ipv4/ip_local_port_range",),
        ),
        ("few-ports",),
        "only 1000 ports",
    ),
    "somaxconn": Change(
        commands("echo 16 >/proc/sys/net/core/somaxconn", after=("echo 4096 >/proc/sys/net/core/somaxconn",)),
        ("somaxconn",),
        "only 16 connections",
    ),
    "proxy": Change(started_by("https_proxy=http://u:secret@proxy:3128"), ("proxy",), "https_proxy is set"),
    "switch": Change(started_by("CUDA_LAUNCH_BLOCKING=1"), ("debug-switch",), "CUDA_LAUNCH_BLOCKING=1 is set"),
    "half-copied": Change(
        commands(
            "lib=$TORCH/lib/libtorch_python.so; head -c 9999 $lib >$HOME/half.so && mount --bind $HOME/half.so $lib",
            after=("umount $TORCH/lib/libtorch_python.so",),
        ),
        ("differs.files",),
        "torch/lib of 2.13.0",
    ),
    "debug": Change(started_by("TORCH_DISTRIBUTED_DEBUG=DETAIL"), ("differs.debug",), "DETAIL"),
}
"""All changes, by name."""
WITHOUT_CHANGE_LEVELS = ("fail", "warn", "unknown")


def complaints(report: dict[str, Any]) -> list[str]:
    """List what a report of equal nodes must not have."""
    found = [
        f"{finding['id']}: {finding['title']}"
        for finding in report["findings"]
        if finding["level"] in WITHOUT_CHANGE_LEVELS
    ]
    return found + [row["fact"] for row in report["data"]["differences"]]
