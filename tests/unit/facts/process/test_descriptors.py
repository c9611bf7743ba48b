"""What descriptors point to: each kind that there is, opened here by this process itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import tempfile
from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.facts.process.descriptors import Descriptor, End, Look, Watch, descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ME = os.getpid()


def look_at(fd: int) -> Descriptor:
    found = descriptors(ME)
    assert found.unread == ""
    return next(one for one in found.descriptors if one.fd == fd)


@contextlib.contextmanager
def opened(*fds: int) -> Iterator[tuple[int, ...]]:
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def test_a_file_has_a_size_and_a_position(tmp_path: Path) -> None:
    path = tmp_path / "data (deleted)"  # a name resembling the kernel's suffix of deleted files
    path.write_bytes(b"0123456789")
    with opened(os.open(path, os.O_RDONLY)) as (fd,):
        os.lseek(fd, 4, os.SEEK_SET)
        one = look_at(fd)
    assert (one.kind, one.target, one.mode, one.deleted) == ("file", str(path), "r", False)
    assert (one.position, one.size_bytes, one.inode) == (4, 10, path.stat().st_ino)


@pytest.mark.parametrize(
    ("flags", "mode"), [(os.O_RDONLY, "r"), (os.O_WRONLY, "w"), (os.O_RDWR | os.O_APPEND, "rw"), (os.O_PATH, "")]
)
def test_how_it_was_opened(tmp_path: Path, flags: int, mode: str) -> None:
    (tmp_path / "file").touch()
    with opened(os.open(tmp_path / "file", flags)) as (fd,):
        one = look_at(fd)
    assert (one.mode, one.flags & flags) == (mode, flags)


def test_a_deleted_file_still_has_its_size(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as file:
        file.write(b"hello")
        (tmp_path / "log").unlink()
        one = look_at(file.fileno())
    assert (one.kind, one.deleted, one.target) == ("deleted file", True, str(tmp_path / "log"))
    assert (one.size_bytes, one.position) == (5, 5)


def test_shared_memory() -> None:
    fd, path = tempfile.mkstemp(dir="/dev/shm")
    with opened(fd):
        os.truncate(fd, 4096)
        one = look_at(fd)
        os.unlink(path)
        gone = look_at(fd)
    assert (one.kind, one.target, one.size_bytes, one.deleted) == ("shm", path, 4096, False)
    assert (gone.kind, gone.target, gone.size_bytes, gone.deleted) == ("shm", path, 4096, True)


def test_memory_without_a_file_system() -> None:
    with opened(os.memfd_create("weights")) as (fd,):
        os.truncate(fd, 100)
        one = look_at(fd)
    assert (one.kind, one.target, one.size_bytes) == ("memfd", "/memfd:weights", 100)


def test_a_directory_and_a_device(tmp_path: Path) -> None:
    with opened(os.open(tmp_path, os.O_RDONLY), os.open("/dev/null", os.O_RDONLY)) as (folder, device):
        assert (look_at(folder).kind, look_at(folder).size_bytes) == ("directory", None)
        assert (look_at(device).kind, look_at(device).target) == ("device", "/dev/null")


def test_a_pipe_knows_who_has_the_other_end() -> None:
    with opened(*os.pipe()) as (reads, writes):
        one, other = look_at(reads), look_at(writes)
        assert (one.kind, one.mode, one.target) == ("pipe", "r", f"pipe:[{one.inode}]")
        assert one.ends == (End(ME, writes, "w"),)
        assert other.ends == (End(ME, reads, "r"),)


def test_a_pipe_whose_other_end_nobody_has() -> None:
    reads, writes = os.pipe()
    os.close(writes)
    with opened(reads):
        assert look_at(reads).ends == ()


def test_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    both = os.open(tmp_path / "fifo", os.O_RDWR)
    with opened(both, os.open(tmp_path / "fifo", os.O_RDONLY)) as (_, reads):
        one = look_at(reads)
    assert (one.kind, one.target, one.ends) == ("fifo", str(tmp_path / "fifo"), (End(ME, both, "rw"),))


def test_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
            accepted.sendall(b"hello")
            select.select([client], [], [], 10)  # it may be on its way
            listener, one = look_at(server.fileno()), look_at(client.fileno())
            assert listener.socket is not None
            assert (listener.socket.state, listener.socket.backlog) == ("LISTEN", 0)
            assert one.socket is not None
            assert (one.kind, one.socket.protocol, one.socket.state) == ("socket", "tcp", "ESTABLISHED")
            assert (one.socket.remote, one.socket.receive_queue_bytes) == (f"127.0.0.1:{port}", 5)


def test_a_unix_connection_knows_the_path_and_who_has_the_other_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        client.connect(str(tmp_path / "socket"))
        with server.accept()[0] as accepted:
            one = look_at(client.fileno())
            assert one.ends == (End(ME, accepted.fileno(), "rw"),)
            assert one.socket is not None
            assert (one.socket.protocol, one.socket.remote) == ("unix", str(tmp_path / "socket"))


@each(
    "family, kind, protocol",
    [
        (socket.AF_INET, socket.SOCK_STREAM, "tcp"),
        (socket.AF_INET6, socket.SOCK_STREAM, "tcp6"),
        (socket.AF_INET, socket.SOCK_DGRAM, "udp"),
        (socket.AF_NETLINK, socket.SOCK_RAW, "netlink"),
        (socket.AF_UNIX, socket.SOCK_STREAM, "unix"),
    ],
)
def test_a_socket_that_is_not_connected_yet(
    family: socket.AddressFamily, kind: socket.SocketKind, protocol: str
) -> None:
    with socket.socket(family, kind) as one:
        found = look_at(one.fileno()).socket
    assert found is not None
    assert (found.protocol, found.local, found.remote) == (protocol, "", "")


def test_an_epoll_tells_what_it_watches() -> None:
    with opened(*os.pipe()) as (reads, writes), select.epoll() as epoll:
        epoll.register(reads, select.EPOLLIN)
        epoll.register(writes, select.EPOLLOUT | select.EPOLLET)
        one = look_at(epoll.fileno())
    assert (one.kind, one.target) == ("anon", "anon_inode:[eventpoll]")
    assert set(one.watches) == {Watch(reads, "r"), Watch(writes, "w")}


def test_what_has_no_name() -> None:
    with opened(ctypes.CDLL(None).eventfd(0, 0)) as (fd,):
        assert (look_at(fd).kind, look_at(fd).target) == ("anon", "anon_inode:[eventfd]")


def test_several_processes_may_share_a_look() -> None:
    look = Look()
    assert look.hidden is None
    with opened(*os.pipe()) as (reads, writes):
        first = descriptors(ME, look)
        assert next(one for one in first.descriptors if one.fd == reads).ends == (End(ME, writes, "w"),)
    assert first.hidden is not None
    assert look.hidden == first.hidden


def test_no_such_process() -> None:
    assert descriptors(2**22 + 1).unread == "gone"
