"""Counters of network links: interfaces, InfiniBand ports, TCP. Two readings show which still grow.

Sources: proc(5) (/proc/net/dev, /proc/net/snmp); the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import glob
import os
import time
from dataclasses import field

from distdiag.facts import machine
from distdiag.record import record

_COLUMNS = {"rx_errors": 2, "rx_dropped": 3, "tx_errors": 10, "tx_dropped": 11, "tx_carrier": 14}
"""Columns of /proc/net/dev after the interface's name, from 0."""
_IB_ERRORS = (
    *("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "local_link_integrity_errors"),
    *("excessive_buffer_overrun_errors", "port_xmit_discards", "port_rcv_remote_physical_errors"),
)
_IB_HARDWARE = ("packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans")


@record
class Counter:
    """One counter: its value, and its growth between two readings."""

    link: str
    name: str
    value: int
    grown: int


@record
class Counters:
    """Counters above zero, read twice, `over_s` apart. TCP: segments sent and retransmitted meanwhile."""

    over_s: float = 0.0
    links: tuple[Counter, ...] = ()
    tcp_sent: int = 0
    tcp_resent: int = 0
    firmware: dict[str, str] = field(default_factory=dict)
    """Of RDMA devices, by device."""


def sample(over_s: float, root: str = "") -> Counters:
    """Read twice; `root`: a folder with copies of /proc and /sys."""
    before, began = _links(root), time.monotonic()
    sent, resent = _tcp(root)
    time.sleep(over_s)
    after, now_sent_resent = _links(root), _tcp(root)
    changes = (
        Counter(link, name, value, max(0, value - before.get((link, name), value)))
        for (link, name), value in after.items()
    )
    return Counters(
        over_s=time.monotonic() - began,
        links=tuple(counter for counter in changes if counter.value),
        tcp_sent=max(0, now_sent_resent[0] - sent),
        tcp_resent=max(0, now_sent_resent[1] - resent),
        firmware={
            path.split("/")[-2]: machine.read_text(path).strip()
            for path in sorted(glob.glob(f"{root}/sys/class/infiniband/*/fw_ver"))
        },
    )


def _links(root: str) -> dict[tuple[str, str], int]:
    found = {}
    for line in machine.read_text(f"{root}/proc/self/net/dev").splitlines()[2:]:
        name, _, rest = line.partition(":")
        columns = rest.split()
        if name.strip() != "lo" and len(columns) > max(_COLUMNS.values()):
            found.update({(name.strip(), what): int(columns[at]) for what, at in _COLUMNS.items()})
    for folder in sorted(glob.glob(f"{root}/sys/class/infiniband/*/ports/*")):
        parts = folder.split("/")
        for place, names in (("counters", _IB_ERRORS), ("hw_counters", _IB_HARDWARE)):
            for what in names:
                text = machine.read_text(os.path.join(folder, place, what)).strip()
                if text.isdigit():  # "N/A (no PMA)" for iWARP cards
                    found[f"{parts[-3]}:{parts[-1]}", what] = int(text)
    return found


def _tcp(root: str) -> tuple[int, int]:
    """Read the numbers of segments sent and retransmitted since the start of this network namespace."""
    rows = [line.split() for line in machine.read_text(f"{root}/proc/self/net/snmp").splitlines()]
    tcp = [row for row in rows if row[:1] == ["Tcp:"]]
    if len(tcp) != 2:
        return 0, 0
    values = dict(zip(tcp[0][1:], tcp[1][1:]))
    return int(values.get("OutSegs", 0)), int(values.get("RetransSegs", 0))
