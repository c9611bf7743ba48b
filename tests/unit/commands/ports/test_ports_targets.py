"""Arguments of ports."""

from __future__ import annotations

import pytest

from distdiag.commands.ports.types import read_ports, read_target
from distdiag.errors import UsageError


def test_ports_and_hosts_are_read() -> None:
    assert read_ports("6000, 29500-29502,6000") == (6000, 29500, 29501, 29502)
    assert read_target("node1", ()) == [("node1", 29500)]
    assert read_target("node1:80-81", (7,)) == [("node1", 80), ("node1", 81)]
    assert read_target("[fd00::1]:80", ()) == [("fd00::1", 80)]
    assert read_target("fd00::1", (7,)) == [("fd00::1", 7)]
    assert read_target("::1", (7,)) == [("::1", 7)]
    for wrong in ("", "a b", "node:x", "[::1", "node:0"):
        with pytest.raises(UsageError):
            read_target(wrong, ())
