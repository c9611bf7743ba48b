"""One line of strace: whatever stands in it, and wherever it ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distdiag.facts.strace import descriptors, lines
from distdiag.facts.strace.lines import BEGUN, CALL, ENDED, REMARK, RESUMED, SIGNAL, STACK, Line, Shape

RECORDED = Path(__file__).parents[1] / "recorded" / "strace"
VERSIONS = ["5.10", "6.1", "6.13", "7.2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("brk(NULL) = 0x55c7d6a3b000", Line(CALL, b"brk", b"NULL", b"0x55c7d6a3b000")),
        (
            '1234  12:00:01.000002 read(3</x>, "a) = 1\\"(", 9) = 9 <0.000012>',
            Line(CALL, b"read", b'3</x>, "a) = 1\\"(", 9', b"9", b"", b"0.000012", b"12:00:01.000002", b"1234"),
        ),
        (
            '[pid    77] 1700000000.5 open("/x", O_RDONLY) = -1 ENOENT (No such file or directory)',
            Line(CALL, b"open", b'"/x", O_RDONLY', b"-1", b"ENOENT", b"", b"1700000000.5", b"77"),
        ),
        ("1234<pt_main x> close(3) = 0", Line(CALL, b"close", b"3", b"0", tid=b"1234", comm=b"pt_main x")),
        ("     0.000123 close(3) = 0", Line(CALL, b"close", b"3", b"0", step=b"0.000123")),
        ("12:00:01 (+     0.000123) close(3) = 0", Line(CALL, b"close", b"3", b"0", at=b"12:00:01")),
        ("[00007f3a1c2d3e4f] close(3) = 0", Line(CALL, b"close", b"3", b"0")),
        ('openat(AT_FDCWD, "/e", 0) = 6</e>', Line(CALL, b"openat", b'AT_FDCWD, "/e", 0', b"6</e>")),
        ("exit_group(1)                           = ?", Line(CALL, b"exit_group", b"1", b"?")),
        (
            "pause() = ? ERESTARTNOHAND (To be restarted if no handler)",
            Line(CALL, b"pause", b"", b"?", b"ERESTARTNOHAND"),
        ),
        (
            "poll([{fd=3, events=POLLIN}], 1, 5) = 1 ([{fd=3, revents=POLLIN}]) <0.1>",
            Line(CALL, b"poll", b"[{fd=3, events=POLLIN}], 1, 5", b"1 ([{fd=3, revents=POLLIN}])", took=b"0.1"),
        ),
        ("12 read(4,  <unfinished ...>", Line(BEGUN, b"read", b"4, ", b"unfinished", tid=b"12")),
        ("12 read(4 <unfinished ...>", Line(BEGUN, b"read", b"4", b"unfinished", tid=b"12")),
        ("recvfrom(4,  <detached ...>", Line(BEGUN, b"recvfrom", b"4, ", b"detached")),
        (
            "restart_syscall(<... resuming interrupted futex ...> <unfinished ...>",
            Line(BEGUN, b"futex", b"<... resuming interrupted futex ...>", b"unfinished"),
        ),
        ('12 <... read resumed>"x", 1) = 1 <0.5>', Line(RESUMED, b"read", b'"x", 1', b"1", took=b"0.5", tid=b"12")),
        ("12 <... futex resumed> )     = 0", Line(RESUMED, b"futex", b" ", b"0", tid=b"12")),
        ("read(3</mnt/da", Line(BEGUN, b"read", b"3</mnt/da")),
        ("--- SIGSEGV {si_signo=SIGSEGV, si_addr=0x8} ---", Line(SIGNAL, b"SIGSEGV")),
        ("--- stopped by SIGSTOP ---", Line(SIGNAL, b"SIGSTOP", result=b"stopped")),
        ("+++ exited with 1 +++", Line(ENDED, b"exited", result=b"1")),
        ("+++ killed by SIGKILL (core dumped) +++", Line(ENDED, b"killed", result=b"SIGKILL")),
        ("+++ superseded by execve in pid 77 +++", Line(ENDED, b"superseded", result=b"execve")),
        (" > /lib/libc.so.6(__read+0x14) [0xfe1d4]", Line(STACK)),
        ("strace: Process 77 attached with 3 threads", Line(REMARK)),
        ("[ Process PID=77 runs in 32 bit mode. ]", Line(REMARK)),
    ],
)
def test_a_line_is_read(text: str, expected: Line) -> None:
    assert lines.parse(text.encode()) == expected


@pytest.mark.parametrize(
    "text", ["", "Epoch 3: loss = 0.25", "Traceback (most recent call last):", "\x00\xff\x80(", "1"]
)
def test_what_strace_did_not_write_is_no_line(text: str) -> None:
    assert lines.parse(text.encode("latin-1")) is None


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("read", '4<TCP:[127.0.0.1:51916->127.0.0.1:36343]>, "x"', (4, "TCP:[127.0.0.1:51916->127.0.0.1:36343]")),
        ("read", "4<TCPv6:[[::1]:2222->[::1]:333]>, ", (4, "TCPv6:[[::1]:2222->[::1]:333]")),
        ("read", "5<UNIX-STREAM:[123->124]>, ", (5, "UNIX-STREAM:[123->124]")),
        ("ioctl", "9</dev/nvidia0<char 195:0>>, 0x2a", (9, "/dev/nvidia0")),
        ("read", "3</tmp/x (deleted)>, 1", (3, "/tmp/x")),
        ("read", "3</tmp/x>(deleted), 1", (3, "/tmp/x")),
        ("epoll_wait", "6<anon_inode:[eventpoll]>, ", (6, "anon_inode:[eventpoll]")),
        ("openat", 'AT_FDCWD</srv/job>, "../a \\"b\\"\\303\\251", 0', (None, '/srv/a "b"\u00e9')),
        ("openat", 'AT_FDCWD, "conf.yaml", 0', (None, "conf.yaml")),
        ("newfstatat", '3</mnt>, "x/y", 0', (3, "/mnt/x/y")),
        ("write", '3</mnt>, "x/y", 0', (3, "/mnt")),
        ("stat", '"/etc/x", 0', (None, "/etc/x")),
        ("poll", "[{fd=7<pipe:[9]>, events=POLLIN}], 1", (7, "pipe:[9]")),
        (
            "connect",
            '3<TCP:[9]>, {sa_family=AF_INET, sin_port=htons(29500), sin_addr=inet_addr("10.0.0.1")}, 16',
            (3, "10.0.0.1:29500"),
        ),
        (
            "connect",
            '3, {sa_family=AF_INET6, sin6_port=htons(1), inet_pton(AF_INET6, "::1", &sin6_addr), 28',
            (3, "[::1]:1"),
        ),
        ("connect", '3, {sa_family=AF_UNIX, sun_path="/run/x"}, 9', (3, "/run/x")),
        ("exit_group", "3", (None, "")),
        ("futex", "0x7f00, FUTEX_WAIT", (None, "")),
        ("brk", "NULL", (None, "")),
    ],
)
def test_what_a_call_is_about(name: str, args: str, expected: tuple[int | None, str]) -> None:
    assert descriptors.about(name.encode(), args.encode()) == expected


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("/mnt/data/imagenet/x.tar", "/mnt/data"),
        ("/etc/hostname", "/etc"),
        ("/x", "/"),
        ("TCP:[1.1.1.1:1->2.2.2.2:2]", "TCP"),
        ("UNIX-STREAM:[1->2]", "UNIX-STREAM"),
        ("pipe:[9]", "pipe"),
        ("anon_inode:[eventpoll]", "anon_inode:[eventpoll]"),
        ("conf.yaml", ""),
        ("10.0.0.1:29500", ""),
    ],
)
def test_the_place_of_a_target(target: str, place: str) -> None:
    assert descriptors.place(target) == place


def test_every_recorded_line_is_read_in_full() -> None:
    kinds = set()
    files = [
        path for path in RECORDED.rglob("*") if path.is_file() and "summary" not in path.name and path.suffix != ".md"
    ]
    for path in files:
        for text in path.read_bytes().splitlines():
            line = lines.parse(text)
            glued = text.endswith(b"attached") or text.startswith(b" ")
            assert glued or (line is not None), (path, text)
            if line is not None and line.kind in (CALL, RESUMED):
                assert line.result, (path, text)
                assert re.fullmatch(rb"\d+\.\d+|", line.took), (path, text)
                kinds.add(line.kind)
    assert kinds == {CALL, RESUMED}
    assert {path.relative_to(RECORDED).parts[0].partition("_")[0] for path in files} == {*VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("files", Shape(tids=True, timed=True, steps=False, took=True, decoded=True)),
        ("files_bare", Shape(tids=False, timed=False, steps=False, took=False, decoded=False)),
        ("threads_stderr", Shape(tids=True, timed=True, steps=False, took=False, decoded=True)),
        ("forks_relative", Shape(tids=True, timed=True, steps=True, took=False, decoded=True)),
        ("threads", Shape(tids=True, timed=False, steps=False, took=False, decoded=False)),
    ],
)
def test_the_shape_of_a_log_is_found(version: str, name: str, expected: Shape) -> None:
    assert lines.sniff((RECORDED / f"{version}_{name}.txt").read_bytes()) == expected


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"", "the file is empty"),
        (b"Epoch 1\nEpoch 2\n", "not a strace log"),
        (bytes(range(256)) * 100, "not a strace log"),
        (b"def f(x):\n    y = f(x)\nprint(f(1)) == 3\n" * 30, "not a strace log"),
    ],
)
def test_what_is_no_log_is_told(head: bytes, why: str) -> None:
    assert lines.sniff(head) == why


@pytest.mark.parametrize("version", VERSIONS)
def test_a_summary_is_no_log(version: str) -> None:
    assert lines.sniff((RECORDED / f"{version}_summary.txt").read_bytes()) == "only a summary (-c), not a log"


@pytest.mark.parametrize(
    ("call", "args", "shown"),
    [
        ("write", b'3</tmp/x>, "secret"..., 60', b'3</tmp/x>, ""..., 60'),
        ("write", b'3, "a \\"secret\\" sun_path=\\"", 9', b'3, ""..., 9'),
        ("write", b'3, "secre', b'3, ""...'),
        ("read", b'3, "", 1', b'3, "", 1'),
        ("read", b'3, ""..., 832', b'3, ""..., 832'),
        ("sendmsg", b'5, {msg_name=NULL, msg_iov=[{iov_base="secret", iov_len=6}]', None),
        ("setxattr", b'"/tmp/x", "user.key", "secret", 6, 0', None),
        ("mount", b'"//nas/x", "/mnt", "cifs", 0, "password=secret"', None),
        ("getrandom", b'"\\x01secret", 8, 0', None),
        ("execve", b'"/usr/bin/x", ["x", "--token=secret"], 0x7 /* 9 vars */', b'"/usr/bin/x"'),
        ("openat", b'AT_FDCWD</a>, "data/shard", O_RDONLY', b'AT_FDCWD</a>, "data/shard", O_RDONLY'),
        ("rename", b'"/a/x", "/a/y"', b'"/a/x", "/a/y"'),
        (
            "sendto",
            b'3<UDP:[1]>, "secret", 6, 0, {sa_family=AF_INET, sin_addr=inet_addr("10.0.0.2")}, 16',
            b'3<UDP:[1]>, ""..., 6, 0, {sa_family=AF_INET, sin_addr=inet_addr("10.0.0.2")}, 16',
        ),
        ("connect", b'3, {sa_family=AF_UNIX, sun_path="/run/x"}, 9', b'3, {sa_family=AF_UNIX, sun_path="/run/x"}, 9'),
        ("connect", b'3, {sun_path=@"x"}, 9', b'3, {sun_path=@"x"}, 9'),
        (
            "connect",
            b'3, {inet_pton(AF_INET6, "::1", &sin6_addr)}, 28',
            b'3, {inet_pton(AF_INET6, "::1", &sin6_addr)}, 28',
        ),
    ],
)
def test_of_arguments_paths_and_addresses_are_shown_and_no_data(call: str, args: bytes, shown: bytes | None) -> None:
    found = descriptors.without_payload(call.encode(), args)
    assert b"secret" not in found
    assert found == (found if shown is None else shown)


def test_data_and_names_of_processes_are_not_what_a_call_is_about() -> None:
    assert descriptors.about(b"getrandom", b'"\\x01secret", 8, 0') == (None, "")
    assert descriptors.about(b"wait4", b"4711<python3>, NULL, 0, NULL") == (None, "")


def test_what_only_looks_like_an_escape_stays() -> None:
    assert descriptors.unescape(rb"/a\8\0619\n") == "/a819\n"
