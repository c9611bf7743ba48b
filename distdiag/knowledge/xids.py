"""What an Xid of NVIDIA's driver means, and whom it blames; as data (xids.toml)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

SOURCE = "https://docs.nvidia.com/deploy/xid-errors/index.html"
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<address>[^)]*)\): (?P<code>\d+)")
_RECOVERY = re.compile(r"recovery action changed from \S+ \([^)]*\) to \S+ \((?P<action>[^)]*)\)")


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One kind of error. `blames`: gpu, memory, application or consequence; empty for one that is not in the table."""

    code: int
    blames: str = ""
    means: str = ""


@dataclass(frozen=True, kw_only=True)
class XidLine:
    """A line of the kernel's log. `address`: of the GPU, "0000:3b:00"; `action`: what the driver wants, of Xid 154."""

    xid: Xid
    address: str
    action: str = ""


def read_line(text: str) -> XidLine | None:
    """Parse "NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has fallen off the bus."; None for any other line."""
    match = _LINE.search(text)
    if match is None:
        return None
    code = int(match["code"][:9])
    action = _RECOVERY.search(text)
    return XidLine(
        xid=table().get(code, Xid(code=code)),
        address=match["address"].strip().lower(),
        action=action["action"] if action is not None else "",
    )


@cache
def table() -> dict[int, Xid]:
    """Read the table, by code."""
    text = resources.files("distdiag.knowledge").joinpath("xids.toml").read_text("utf-8")
    return {entry["code"]: Xid(**entry) for entry in tomllib.loads(text)["xid"]}
