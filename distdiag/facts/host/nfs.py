"""Performance of this node's NFS mounts, from /proc/self/mountstats, without contacting a server."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.facts import machine


@dataclass(frozen=True)
class NfsMount:
    """One NFS mount since it was mounted.

    `operations`: completed requests; `queue_ms` and `server_ms`: their total milliseconds of waiting for a slot on this
    node, and for the server. `timeouts`: repeated requests. `slots`: maximum of concurrent requests.
    """

    path: str
    server: str
    operations: int = 0
    queue_ms: int = 0
    server_ms: int = 0
    timeouts: int = 0
    slots: int = 0


def mounts() -> tuple[NfsMount, ...]:
    """Read every NFS mount of /proc/self/mountstats."""
    return parse(machine.read_text("/proc/self/mountstats"))


def parse(text: str) -> tuple[NfsMount, ...]:
    """Parse mountstats: per operation "READ: ops sent timeouts bytes bytes queue-ms server-ms total-ms" (nfsiostat)."""
    found = []
    for block in text.split("\ndevice ")[0 if text.startswith("device ") else 1 :]:
        head, _, rest = block.removeprefix("device ").partition("\n")
        words = head.split()
        if len(words) < 7 or words[6] not in ("nfs", "nfs4"):
            continue
        sums = [0, 0, 0, 0]
        slots = 0
        counting = False
        for line in rest.splitlines():
            fields = line.split()
            if fields[:1] == ["xprt:"] and len(fields) > 12 and fields[12].isdecimal():
                slots = max(slots, int(fields[12]))
            counting = counting or line.strip() == "per-op statistics"
            if counting and len(fields) >= 9 and all(field.isdecimal() for field in fields[1:9]):
                for place, column in enumerate((1, 3, 6, 7)):
                    sums[place] += int(fields[column])
        found.append(NfsMount(words[3], words[0], sums[0], sums[2], sums[3], sums[1], slots))
    return tuple(found)
