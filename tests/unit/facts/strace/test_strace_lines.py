"""One line of strace, with any content and any end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loops import each

from distdiag.facts.strace import lines, targets
from distdiag.facts.strace.lines import BEGUN, CALL, ENDED, RESUMED, SIGNAL, Line

RECORDED = Path(__file__).parents[3] / "recorded" / "strace"
VERSIONS = ["5.10", "6.1", "6.13", "7.2"]


AT = "1700000000.5"


def line(
    kind: str,
    name: bytes,
    args: bytes = b"",
    result: bytes = b"",
    error: bytes = b"",
    *,
    tid: bytes = b"",
    took: bytes = b"",
) -> Line:
    return Line(kind, name, args, result, error, took, 1700000000.5, tid)


@each(
    "text, expected",
    [
        ("AT brk(NULL) = 0x55c7d6a3b000", line(CALL, b"brk", b"NULL", b"0x55c7d6a3b000")),
        (
            '1234  AT read(3</x>, "a) = 1\\"(", 9) = 9 <0.000012>',
            line(CALL, b"read", b'3</x>, "a) = 1\\"(", 9', b"9", took=b"0.000012", tid=b"1234"),
        ),
        (
            '77 AT open("/x", O_RDONLY) = -1 ENOENT (No such file or directory)',
            line(CALL, b"open", b'"/x", O_RDONLY', b"-1", b"ENOENT", tid=b"77"),
        ),
        ('AT openat(AT_FDCWD, "/e", 0) = 6</e>', line(CALL, b"openat", b'AT_FDCWD, "/e", 0', b"6</e>")),
        ("AT exit_group(1)                           = ?", line(CALL, b"exit_group", b"1", b"?")),
        (
            "AT pause() = ? ERESTARTNOHAND (To be restarted if no handler)",
            line(CALL, b"pause", b"", b"?", b"ERESTARTNOHAND"),
        ),
        (
            "AT poll([{fd=3, events=POLLIN}], 1, 5) = 1 ([{fd=3, revents=POLLIN}]) <0.1>",
            line(CALL, b"poll", b"[{fd=3, events=POLLIN}], 1, 5", b"1 ([{fd=3, revents=POLLIN}])", took=b"0.1"),
        ),
        ("12 AT read(4,  <unfinished ...>", line(BEGUN, b"read", b"4, ", b"unfinished", tid=b"12")),
        ("12 AT read(4 <unfinished ...>", line(BEGUN, b"read", b"4", b"unfinished", tid=b"12")),
        ("AT recvfrom(4,  <detached ...>", line(BEGUN, b"recvfrom", b"4, ", b"detached")),
        (
            "AT restart_syscall(<... resuming interrupted futex ...> <unfinished ...>",
            line(BEGUN, b"futex", b"<... resuming interrupted futex ...>", b"unfinished"),
        ),
        (
            '12 AT <... read resumed>"x", 1) = 1 <0.5>',
            line(RESUMED, b"read", b'"x", 1', b"1", took=b"0.5", tid=b"12"),
        ),
        ("12 AT <... futex resumed> )     = 0", line(RESUMED, b"futex", b" ", b"0", tid=b"12")),
        ("AT read(3</mnt/da", line(BEGUN, b"read", b"3</mnt/da")),
        ("AT --- SIGSEGV {si_signo=SIGSEGV, si_addr=0x8} ---", line(SIGNAL, b"SIGSEGV")),
        ("AT --- stopped by SIGSTOP ---", line(SIGNAL, b"SIGSTOP")),
        ("AT +++ exited with 1 +++", line(ENDED, b"exited", b"", b"1")),
        ("AT +++ killed by SIGKILL (core dumped) +++", line(ENDED, b"killed", b"", b"SIGKILL")),
        ("AT +++ superseded by execve in pid 77 +++", line(ENDED, b"superseded", b"", b"execve")),
    ],
)
def test_a_line_is_read(text: str, expected: Line) -> None:
    assert lines.parse(text.replace("AT ", f"{AT} ", 1).encode()) == expected


@each(
    "text",
    [
        *("", "Epoch 3: loss = 0.25", "Traceback (most recent call last):", "\x00\xff\x80(", "1"),
        *("close(3) = 0", "12:00:01.000002 close(3) = 0 <0.1>", "[pid    77] 1700000000.5 close(3) = 0 <0.1>"),
        *(" > /lib/libc.so.6(__read+0x14) [0xfe1d4]", "strace: Process 77 attached with 3 threads"),
    ],
)
def test_what_strace_did_not_write_with_these_options_is_no_line(text: str) -> None:
    assert lines.parse(text.encode("latin-1")) is None


@each(
    "name, args, expected",
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
    assert targets.about(name.encode(), args.encode()) == expected


@each(
    "target, place",
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
    assert targets.place(target) == place


def test_every_recorded_line_is_read_in_full() -> None:
    kinds = set()
    for path in (one for name in ("files.txt", "forks/*", "live/*") for one in RECORDED.glob(f"*_{name}")):
        for text in path.read_bytes().splitlines():
            line = lines.parse(text)
            assert line is not None, (path, text)
            if line.kind in (CALL, RESUMED):
                assert line.result, (path, text)
                assert re.fullmatch(rb"\d+\.\d+|", line.took), (path, text)
            kinds.add(line.kind)
    assert kinds == {CALL, BEGUN, SIGNAL, ENDED}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("files.txt", ""),
        ("files_bare.txt", "written by strace without -ttt -T -yy"),
        ("threads_stderr.txt", "written by strace without -ttt -T -yy"),
        ("forks_relative.txt", "written by strace without -ttt -T -yy"),
        ("stacks.txt", "written by strace without -ttt -T -yy"),
        ("summary.txt", "not a strace log"),
    ],
)
def test_why_a_log_cannot_be_read(version: str, name: str, why: str) -> None:
    assert lines.problem((RECORDED / f"{version}_{name}").read_bytes()) == why


@each(
    "head, why",
    [
        (b"", "the file is empty"),
        (b"Epoch 1\nEpoch 2\n", "not a strace log"),
        (bytes(range(256)) * 100, "not a strace log"),
        (b"def f(x):\n    y = f(x)\nprint(f(1)) == 3\n" * 30, "not a strace log"),
        (b'1700000000.5 read(3</x>, "a", 1) = 1\n', "written by strace without -T"),
        (b'1700000000.5 read(3, "a", 1) = 1 <0.1>\n', "written by strace without -yy"),
        (b"12:00:01.000002 recvfrom(4</x>,  <detached ...>\n", "written by strace without -ttt -T -yy"),
    ],
)
def test_what_is_no_log_is_told(head: bytes, why: str) -> None:
    assert lines.problem(head) == why


def test_data_and_names_of_processes_are_not_what_a_call_is_about() -> None:
    assert targets.about(b"getrandom", b'"\\x01secret", 8, 0') == (None, "")
    assert targets.about(b"wait4", b"4711, NULL, 0, NULL") == (None, "")
    assert targets.about(b"read", b"<... resuming interrupted read ...>") == (None, "")


def test_what_only_looks_like_an_escape_stays() -> None:
    assert targets.unescape(rb"/a\8\0619\n") == "/a819\n"
