"""What holds for all tests, whoever starts them."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from support import close_all

if TYPE_CHECKING:
    from collections.abc import Iterator

# A shell's background job and nohup have these ignored, and so would all that the tests start and then signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The kubectl that `make test` fetches goes before the system's, which may be older than what the tests speak.
os.environ["PATH"] = f"{sys.prefix}/kubectl:{os.environ['PATH']}"


@pytest.fixture(autouse=True)
def _no_test_leaves_what_it_started() -> Iterator[None]:
    yield
    close_all()
