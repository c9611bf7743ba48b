"""Ctrl-C, SIGTERM and SIGHUP: the first raises KeyboardInterrupt wherever it arrives; later ones are ignored.

After the first only seconds of work remain, and another interrupt would lose the report.
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
"""A scheduler that terminates us still gets a partial report; so does a file when the terminal hangs up."""
_AGAIN_S = 0.01
_handling = False
_holding = False
_came = False


def handle(*, hold: bool = False) -> None:
    """Install the handlers, except for signals ignored on entry (script, nohup, trap). Main thread only.

    `hold`: only record a signal, until `release`.
    """
    global _handling, _holding
    _handling, _holding = True, hold
    _SIGNALS[:] = [number for number in _ALL if signal.getsignal(number) is not signal.SIG_IGN]
    sys.unraisablehook = _raise_again
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def release() -> None:
    """Stop holding signals. Raises KeyboardInterrupt if one arrived meanwhile."""
    global _holding, _came
    _holding = False
    if _came:
        _came = False
        raise KeyboardInterrupt


def settle() -> None:
    """Ignore handled signals from now on: the report is written."""
    if _handling:
        ignore()


def ignore() -> None:
    """Ignore the signals from now on.

    Uses an empty handler instead of SIG_IGN: for a signal already pending, Python would print a traceback.
    """
    for number in _SIGNALS:
        signal.signal(number, _nothing)


def finish() -> None:
    """Ignore the signals until exit, including while Python removes its own handlers during finalization."""
    ignore()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Defer interrupts, for short work that must complete; see `came`."""
    global _holding
    before, _holding = _holding, True
    try:
        yield
    finally:
        _holding = before


def came() -> bool:
    """Return whether an interrupt arrived while held."""
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
    """Raise a KeyboardInterrupt again, a moment later, if Python could not propagate it.

    This happens in a __del__, or in a weak reference callback, as during every import; otherwise it would be lost.
    """
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    signal.signal(signal.SIGALRM, _again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def _again(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
