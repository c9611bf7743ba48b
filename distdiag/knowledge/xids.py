"""The meaning of the Xids of NVIDIA's driver, and their culprit; as data (xids.toml)."""

from __future__ import annotations

import re
from functools import cache

from distdiag.knowledge.tables import load
from distdiag.record import record

SOURCE = "https://docs.nvidia.com/deploy/xid-errors/index.html"
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<address>[^)]*)\): (?P<code>\d+)")
_RECOVERY = re.compile(r"recovery action changed from \S+ \([^)]*\) to \S+ \((?P<action>[^)]*)\)")
_NVLINK = re.compile(r"(?P<unit>[A-Z][A-Z0-9_]{2,30})\s+(?P<severity>Fatal|Non-?fatal)")
_NVLINK_CODES = range(144, 151)


@record(kw_only=True)
class Xid:
    """One kind of error. `blames`: gpu, memory, application, consequence, remap or none; empty if unknown."""

    code: int
    blames: str = ""
    means: str = ""


@record(kw_only=True)
class XidLine:
    """A line of the kernel's log.

    `address`: of the GPU, "0000:3b:00"; `action`: requested by the driver, Xid 154; `severity`: Fatal or Nonfatal,
    NVLink 5; `unit`: the reporting part of the link.
    """

    xid: Xid
    address: str
    action: str = ""
    severity: str = ""
    unit: str = ""

    @property
    def blames(self) -> str:
        """The culprit; severity and requested action override the code's entry."""
        if self.severity.lower().replace("-", "") == "nonfatal" or self.action == "None":
            return "none"
        return self.xid.blames


def read_line(text: str) -> XidLine | None:
    """Parse "NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has fallen off the bus."; None for any other line."""
    match = _LINE.search(text)
    if match is None:
        return None
    code = int(match["code"][:9])
    action, link = _RECOVERY.search(text), _NVLINK.search(text) if code in _NVLINK_CODES else None
    return XidLine(
        xid=table().get(code, Xid(code=code)),
        address=match["address"].strip().lower(),
        action=action["action"] if action is not None else "",
        severity=link["severity"] if link is not None else "",
        unit=link["unit"] if link is not None else "",
    )


@cache
def table() -> dict[int, Xid]:
    """Return the table by code."""
    return {xid.code: xid for xid in load("xids", "xid", tuple[Xid, ...])}


def role_of(blames: str) -> tuple[str, str]:
    """Return role and text, in a job's log, of a line with this `blames`."""
    return load("xids", "role", dict[str, tuple[str, str]]).get(blames, ("confirmation", ""))
