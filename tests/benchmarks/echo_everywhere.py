"""Runs `echo ok` on the hosts named in a file, by one of two libraries in this process: METHOD FILE CONNECT_SECONDS.

Prints JSON: how many answered, and this process's own processor time and peak memory.
"""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import sys
import time
from pathlib import Path
from typing import Any


def ours(names: list[str], connect_s: float) -> int:
    """By the transport and the links that every command uses."""
    from distdiag.cluster.host_results import HostError
    from distdiag.cluster.hosts import Host
    from distdiag.cluster.transports import Arrivals
    from distdiag.cluster.transports.ssh import SshTransport

    arrivals = Arrivals()
    transport = SshTransport("echo ok", b"", stage_s=connect_s if connect_s < 5 else None)
    transport.start([Host(name=name) for name in names], arrivals)
    selector = selectors.DefaultSelector()
    selector.register(arrivals.bell, selectors.EVENT_READ, None)
    left, good = len(names), 0
    while left:
        for key, _ in selector.select(1):
            if key.data is not None:
                link, said, watched = key.data
                heard = link.read()
                said.append(heard.out)
                for fd in watched.difference(() if heard.ended else link.fds()):
                    watched.discard(fd)
                    selector.unregister(fd)
                if heard.ended:
                    link.kill()
                    good += b"".join(said) == b"ok\n"
                    left -= 1
                continue
            for _, _, what in arrivals.take():
                if isinstance(what, HostError):
                    left -= 1
                elif not isinstance(what, str):
                    reported: tuple[Any, list[bytes], set[int]] = (what, [], set(what.fds()))
                    for fd in what.fds():
                        selector.register(fd, selectors.EVENT_READ, reported)
    transport.close()
    return good


def by_asyncssh(names: list[str], connect_s: float) -> int:
    """By asyncssh, as its documentation shows, 64 at a time: more made it miss its own timeouts here."""
    import asyncssh

    # Read once: by default it would read and search them anew for each of the hosts.
    home = Path.home() / ".ssh"
    settings: dict[str, Any] = {
        "known_hosts": asyncssh.read_known_hosts(str(home / "known_hosts")),
        "client_keys": [asyncssh.read_private_key(str(home / "id_ed25519"))],
        "kex_algs": ["curve25519-sha256"],
        "config": None,
        "agent_path": None,
        "connect_timeout": connect_s,
    }

    async def one(name: str, turn: asyncio.Semaphore) -> bool:
        async with turn:
            try:
                async with asyncssh.connect(name, **settings) as connection:
                    return bool((await connection.run("echo ok")).stdout == "ok\n")
            except (OSError, asyncssh.Error, TimeoutError):
                return False

    async def all_of_them() -> int:
        turn = asyncio.Semaphore(64)
        return sum(await asyncio.gather(*(one(name, turn) for name in names)))

    return asyncio.run(all_of_them())


def main() -> None:
    method: Any = {"distdiag": ours, "asyncssh": by_asyncssh}[sys.argv[1]]
    names = Path(sys.argv[2]).read_text().split()
    began = time.monotonic()
    good = method(names, float(sys.argv[3]))
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    reported = {
        "ok": good,
        "seconds": time.monotonic() - began,
        "cpu_s": time.process_time(),
        "rss_mib": int(peak[1]) >> 10,
    }
    json.dump(reported, sys.stdout)


main()
