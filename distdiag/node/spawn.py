"""Starts a program as `run.start` does, with nothing to import: for what has to begin before anything is loaded."""

from __future__ import annotations

import os


class Spawned:
    """A process that leads a session of its own, and our ends of its standard streams."""

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr


def spawn(argv: list[str]) -> Spawned | None:
    """Start it; None where that cannot be."""
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(3):
            pipes.append(os.pipe())
        its = (pipes[0][0], pipes[1][1], pipes[2][1])
        files = [(os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(its)]
        pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=files, setsid=True)
    except (OSError, NotImplementedError):  # no such program, no descriptors left; no setsid here
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)
        return None
    for fd in its:
        os.close(fd)
    return Spawned(pid, pipes[0][1], pipes[1][0], pipes[2][0])
