"""Ctrl-C, SIGTERM and SIGHUP: the first one ends the work, wherever it arrives; the ones after it change nothing.

The first raises KeyboardInterrupt, once. What is left to do takes seconds then: a second would only lose the report.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = [signal.SIGINT, signal.SIGTERM]
"""A scheduler that ends us gets what is known by then; so does a file, when the terminal hangs up."""
_AGAIN_S = 0.01
_handling = False
_holding = False
_came = False


def handle(*, hold: bool = False) -> None:
    """Handle them from now on, but not what a script, nohup or a trap made us ignore. Only in the main thread.

    `hold`: only remember that one came, until `release`.
    """
    global _handling, _holding
    _handling, _holding = True, hold
    _SIGNALS[:] = [number for number in _ALL if signal.getsignal(number) is not signal.SIG_IGN]
    sys.unraisablehook = _raise_again
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def release() -> None:
    """Hold them no more. Raises KeyboardInterrupt if one came meanwhile."""
    global _holding, _came
    _holding = False
    if _came:
        _came = False
        raise KeyboardInterrupt


def settle() -> None:
    """Ignore them from now on if they were handled: the report is written."""
    if _handling:
        ignore()


def ignore() -> None:
    """Ignore them from now on.

    By a handler that does nothing, not by SIG_IGN: of a signal that came just before, Python would print a traceback.
    """
    for number in _SIGNALS:
        signal.signal(number, _nothing)


def finish() -> None:
    """Ignore them to the very end, also when Python takes its own handlers away while it ends."""
    ignore()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Only remember an interrupt that comes meanwhile, for `came`: for short work that must be done to its end."""
    global _holding
    before, _holding = _holding, True
    try:
        yield
    finally:
        _holding = before


def came() -> bool:
    """Return whether an interrupt came while it was held."""
    return _came


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _came
    ignore()
    if not _holding:
        raise KeyboardInterrupt
    _came = True


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise a KeyboardInterrupt again, a moment later, that was raised where Python lets no exception out.

    In a __del__, or a callback of a weak reference as each import has them; it would be lost, and the work go on.
    """
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    signal.signal(signal.SIGALRM, _again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def _again(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
