"""Lost packets of a connection, from its tcp_info."""

from __future__ import annotations

import struct

from distdiag.agent.tcp_probe import _lost


def info(length: int, **fields: int) -> bytes:
    """Pack tcp_info; `at100=7` sets the field at offset 100."""
    found = bytearray(length)
    for name, value in fields.items():
        struct.pack_into("I", found, int(name[2:]), value)
    return bytes(found)


def test_a_packet_that_had_arrived_is_not_lost_though_it_was_sent_again() -> None:
    assert _lost(info(232, at100=7, at216=5)) == 2
    assert _lost(info(232, at100=1, at216=2)) == 0, "the network may copy packets, too"
    assert _lost(info(192, at100=7)) == 7, "before Linux 4.19"
