"""core-bt on a terminal: each crash with its stack, the other threads folded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.core_bt.wording import format_frame, who
from distdiag.diagnosis.wording import counted
from distdiag.output import Whole, Wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.core_bt.types import Core, CoreBt
    from distdiag.facts.core.stacks import ThreadStack
    from distdiag.report import Report

_MAX_FRAMES, _LAST_FRAMES, _MAX_MESSAGE_LINES = 40, 12, 6


def core_bt_view(report: Report[CoreBt], *, all_threads: bool) -> Iterator[RenderableType]:
    """Format every core: the process, the crashed thread with its stack, the other threads."""
    for core in report.data.cores:
        yield ""
        yield Wrapped(who(core), margin=0, hang=2, style="bold")
        yield Wrapped(f"{core.signal_name}: {core.meaning}", margin=2)
        yield from (
            Wrapped(f"message: {line.strip()}", margin=2) for line in core.message.splitlines()[:_MAX_MESSAGE_LINES]
        )
        yield Whole(f"  core {core.path}")
        if core.exe:
            yield Whole(f"  exe {core.exe}")
        yield from map(Whole, _threads(core, all_threads=all_threads))


def _threads(core: Core, *, all_threads: bool) -> Iterator[str]:
    if core.crash_thread is not None:
        yield f"  crashed thread: {_named(core.crash_thread)}"
        yield from _stack(core.crash_thread, _MAX_FRAMES)
    else:
        yield "  the stack of the crashed thread could not be read"
    groups: dict[tuple[str, ...], list[ThreadStack]] = {}
    for thread in core.threads:
        groups.setdefault(tuple(format_frame(frame) for frame in thread.frames), []).append(thread)
    if groups and not all_threads:
        yield f"  {counted(len(core.threads), 'other thread')}:"
    for frames, group in sorted(groups.items(), key=lambda item: (-_python(item[1]), -len(item[1]))):
        names = f"{len(group)} threads" if len(group) > 1 else _named(group[0])
        if all_threads:
            yield f"  {names}"
            yield from _stack(group[0], _MAX_FRAMES)
        else:
            yield f"    {names}: {_short(frames)}"


def _python(group: Sequence[ThreadStack]) -> int:
    return sum(frame.language == "python" for frame in group[0].frames)


def _short(frames: tuple[str, ...]) -> str:
    return " < ".join(frames[:3]) + (" < ..." if len(frames) > 3 else "") if frames else "no stack"


def _named(thread: ThreadStack) -> str:
    gil = ", holds the GIL" if thread.gil else ""
    return f"{thread.tid}{f' ({thread.name})' if thread.name else ''}{gil}"


def _stack(thread: ThreadStack, most: int) -> Iterator[str]:
    frames = thread.frames
    shown = frames if len(frames) <= most else (*frames[: most - _LAST_FRAMES], *frames[-_LAST_FRAMES:])
    for number, frame in enumerate(shown):
        if len(frames) > most and number == most - _LAST_FRAMES:
            yield f"      ... {len(frames) - most} more frames ..."
        yield f"    {'py' if frame.language == 'python' else 'C '} {format_frame(frame)}"
