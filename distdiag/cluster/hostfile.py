"""Hosts from files and schedulers: every common hostfile by one grammar, `hosts [key=value ...] [# note]` on a line.

It covers Open MPI and DeepSpeed (`h slots=8`), MPICH and Intel MPI (`h:8`), PBS (a line per slot) and pdsh (host
lists).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from distdiag.cluster.hostlist import MAX_NAMES, located, quote, spell
from distdiag.cluster.hosts import Host, HostList, merge, read_list, read_port, read_slots, read_user
from distdiag.errors import UsageError

_NOTE = re.compile(r"(?:^|\s)#.*")
_OPTIONS = re.compile(r"(?<!\s)\s+(?=[A-Za-z_][\w.-]*\s*=)")
# Open MPI allows spaces around "=", and values may be quoted; `a= b=1` is an empty a, then b.
_OPTION = re.compile(r"""\s*([A-Za-z_][\w.-]*)\s*=(?:\s+(?![\w.-]+\s*=))?(?:'([^']*)'|"([^"]*)"|(\S*))(?!\S)""")
_KNOWN = ("slots", "port", "user")
_SLURM_PART = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def read_hostfile(text: str, name: str) -> HostList:
    """Read a hostfile; `name` identifies it in errors.

    A host on several lines has the sum of its slots; a line without slots counts as one, as in Open MPI and PBS. It is
    a duplicate only if a line gives slots. A host with `slots=0` is left out. Unknown keys are ignored.

    Raises:
        UsageError: a line is malformed, or no line names a host.
    """
    hosts: list[Host] = []
    excluded: set[str] = set()
    for number, row in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if line := _NOTE.sub("", row).strip():
            with located(f"{name}, line {number}"):
                more, unwanted = _read_line(line, MAX_NAMES - len(hosts))
            hosts += more
            excluded |= unwanted
    found = _count(hosts, excluded)
    if not found.hosts:
        raise UsageError(f"{name}: no hosts in it", hint="write one host per line: node1 slots=8")
    return found


def _read_line(line: str, room: int) -> tuple[list[Host], set[str]]:
    options = _OPTIONS.search(line)
    end = options.start() if options else len(line)
    hosts, excluded = read_list(line[:end], room=room)
    given = _read_options(line[end:])
    slots = read_slots(given["slots"]) if "slots" in given else None
    port = read_port(given["port"]) if "port" in given else None
    user = read_user(given["user"]) if "user" in given else None
    if slots is not None and any(host.slots is not None for host in hosts):
        raise UsageError("slots is given twice")
    return [
        replace(
            host,
            slots=host.slots if slots is None else slots,
            port=port or host.port,
            user=user or host.user,
        )
        for host in hosts
    ], excluded


def _read_options(text: str) -> dict[str, str]:
    """Return the values of the known keys."""
    given: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _OPTION.match(text, at)
        if match is None:
            raise UsageError(f"{quote(text[at:].strip())} is not key=value")
        at = match.end()
        if match[1] in given:
            raise UsageError(f"{match[1]} is given twice")
        if match[1] in _KNOWN:
            given[match[1]] = match[match.lastindex or 0]
    return given


def _count(hosts: list[Host], excluded: set[str]) -> HostList:
    """Merge the hosts; a line without slots is one slot if its host has several lines."""
    times = Counter(host.name for host in hosts)
    sized = {host.name for host in hosts if host.slots is not None}
    counted = (replace(host, slots=1) if host.slots is None and times[host.name] > 1 else host for host in hosts)
    found = merge(counted, excluded)
    return replace(found, duplicates=tuple(name for name in found.duplicates if name in sized))


def slurm_tasks(text: str) -> list[int]:
    """Parse SLURM_TASKS_PER_NODE, the tasks of each node in turn: "2(x2),1" is [2, 2, 1]. Raises UsageError."""
    tasks: list[int] = []
    with located("SLURM_TASKS_PER_NODE"):
        for part in text.split(","):
            match = _SLURM_PART.fullmatch(part)
            if match is None:
                raise UsageError(f"{quote(part)} is not a task count such as 2 or 2(x3)")
            if int(match[2] or 1) > MAX_NAMES - len(tasks):
                raise UsageError(f"more than {MAX_NAMES:,} nodes")
            tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def lsf_hosts(text: str) -> list[Host]:
    """Parse LSB_MCPU_HOSTS, hosts and slots in turn: "h1 4 h2 4". Raises UsageError."""
    words = text.split()
    with located("LSB_MCPU_HOSTS"):
        if not words or len(words) % 2:
            raise UsageError("missing number of slots" if words else "no host given")
        pairs = zip(words[::2], words[1::2], strict=True)
        hosts = [Host(name=spell(name, room=1)[0], slots=read_slots(slots)) for name, slots in pairs]
    return list(merge(hosts, set()).hosts)
