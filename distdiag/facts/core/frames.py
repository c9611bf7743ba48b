"""Stacks in which Python and C frames stand together, as every tool that reads stacks hands them over."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = ("???", "??", "")
"""What tools say for a function or module that they do not know."""


@dataclass(frozen=True)
class Frame:
    """One frame of one thread. `file`, `line` and `module` are "", None and "" where nobody knows them.

    `language` is "python" or "c" (whatever is compiled). `module` is the program or shared object of a C frame.
    `entry`: C code started a loop of the interpreter for this Python frame; those that it called may share the loop.
    """

    language: str
    function: str
    file: str
    line: int | None
    module: str
    entry: bool = False


@dataclass(frozen=True)
class ThreadStack:
    """One thread's frames, innermost first. `tid` as the kernel counts; `gil`: it holds the GIL, None if not known.

    `aligned`: every loop of the interpreter among the C frames has its Python frames; else their places are a guess.
    """

    tid: int
    name: str
    frames: tuple[Frame, ...]
    gil: bool | None
    aligned: bool = True


@dataclass(frozen=True)
class Stacks:
    """What one tool read from one core or process in `seconds`.

    `error` says why there are no threads or, beside threads, what makes them doubtful. `cut_off`: the tool was ended
    before it was done.
    """

    tool: str
    threads: tuple[ThreadStack, ...]
    error: str
    seconds: float
    cut_off: bool = False
