"""The C library by ctypes, for calls missing in Python's os module."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes


def load() -> ctypes.CDLL:
    """Load it, with errno kept per thread. Raises OSError (ENOSYS) if Python was built without ctypes."""
    try:
        import ctypes
    except ImportError as error:
        raise OSError(errno.ENOSYS, "this Python was built without ctypes") from error
    return ctypes.CDLL(None, use_errno=True)


def last_error() -> OSError:
    """Return the error of this thread's last call."""
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
