"""Runs at startup of each Python of a `distdiag run` job: hands its output to the recorder, if it is a rank.

The rank writes into a pipe (or a pseudo-terminal instead of a terminal); the recorder copies the bytes to the original
destination and into a file. Without a recorder the streams stay unchanged.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import stat
import sys

from distdiag.facts import machine, programs
from distdiag.facts.process.rank_identity import identify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.facts.process.rank_identity import Identity

VARIABLE = "DISTDIAG_RUN"
"""Its value is JSON.

{"socket": path, "ranks": list of ranks or null, "env": variables that only these ranks get,
"sanitizer": words to put before the command of these ranks; empty for none}.
"""
_RECORDED = "DISTDIAG_RUN_RANK"
_SANITIZED = "DISTDIAG_RUN_SANITIZED"
_ANSWER_S = 5.0
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch", "mpirun")


def begin_from_environment() -> None:
    """Register this process with the recorder if it is a rank, and set the variables of --rank."""
    identity = identify(os.environ)
    if identity is None or _is_launcher():
        return
    generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{identity.launcher} {identity.rank} {generation}"
    if os.environ.get(_RECORDED) == name:  # a helper that the rank has started
        return
    asked = json.loads(os.environ[VARIABLE])
    if asked["ranks"] is None or identity.rank in asked["ranks"]:
        os.environ.update(asked["env"])
        if asked.get("sanitizer"):
            _go_below(asked["sanitizer"], name)
    os.environ[_RECORDED] = name
    _hand_over(asked["socket"], identity, int(generation) if generation.isdigit() else 0)


def _go_below(sanitizer: list[str], name: str) -> None:
    """Exec the sanitizer, which starts this rank again as its child; in that child, arrange to die with it."""
    if os.environ.get(_SANITIZED) == name:
        programs.die_with_parent()  # a launcher that kills the rank kills the sanitizer alone
        return
    os.environ[_SANITIZED] = name
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    python = os.path.realpath("/proc/self/exe") if not os.path.isabs(sys.executable or "") else sys.executable
    rank = name.split()[1]
    os.execv(sanitizer[0], [word.replace("{rank}", rank) for word in sanitizer] + [python, *words[1:]])


def _is_launcher() -> bool:
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read(65536).decode("utf-8", "replace").split("\0")
    return any(os.path.basename(word) in _LAUNCHERS for word in words[:4])


def _hand_over(path: str, identity: Identity, generation: int) -> None:
    """Pass read ends and original descriptors to the recorder; replace 1 and 2 only after its acknowledgement."""
    streams = streams_of(1, 2)
    with contextlib.ExitStack() as stack:
        channels = [channel(number[0]) for _, number in streams]
        for ends in channels:
            for end in ends:
                stack.callback(os.close, end)
        about = {
            "rank": identity.rank,
            "local": identity.local_rank,
            "world": identity.world_size,
            "generation": generation,
            "pid": os.getpid(),
            "host": machine.host_name(),
            "master": f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}",
            "streams": [name for name, _ in streams],
        }
        handed = [fd for (_, numbers), (read, _) in zip(streams, channels) for fd in (read, numbers[0])]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(_ANSWER_S)
            link.connect(path)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handed))
            link.sendmsg([json.dumps(about).encode()], [rights])
            if link.recv(16) != b"recorded":
                return
        for (_, numbers), (_, write) in zip(streams, channels):
            for number in numbers:
                os.dup2(write, number)


def streams_of(out: int, err: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the streams with their descriptors; stdout and stderr of the same file are one stream.

    This keeps the order of `> log 2>&1`. A closed descriptor is omitted.
    """
    there = {fd: _place(fd) for fd in (out, err)}
    if there[out] is not None and there[out] == there[err]:
        return [("output", (out, err))]
    return [(name, (fd,)) for name, fd in (("stdout", out), ("stderr", err)) if there[fd] is not None]


def _place(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def channel(fd: int) -> tuple[int, int]:
    """Return (read end, write end) of the replacement of a descriptor: a pty for a terminal, else a pipe."""
    if not stat.S_ISCHR(os.fstat(fd).st_mode) or not os.isatty(fd):
        return os.pipe()
    import fcntl
    import termios

    master, slave = os.openpty()
    for end in (master, slave):
        os.set_inheritable(end, False)
    mode = termios.tcgetattr(slave)
    mode[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    with contextlib.suppress(OSError):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))
    return master, slave
