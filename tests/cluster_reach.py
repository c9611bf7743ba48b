"""Has the client of a test cluster reach hosts with distdiag's own engine, without the cost of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support_warm import run_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster_netns import Node

_PROGRAM = str(Path(__file__).parent / "programs" / "reach_hosts.py")


@dataclass(frozen=True)
class Reached:
    """What became of the hosts."""

    report: dict[str, Any]

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """One row for each host, in the order in which they were named."""
        return {row["host"]: row for row in self.report["rows"]}

    @property
    def states(self) -> dict[str, str]:
        """The state of each host."""
        return {host: row["state"] for host, row in self.rows.items()}

    def count(self) -> dict[str, int]:
        """Count the hosts by state."""
        states = list(self.states.values())
        return {state: states.count(state) for state in dict.fromkeys(states)}

    def finding(self, host: str) -> dict[str, Any]:
        """Give the one finding that is about a host."""
        (found,) = [one for one in self.report["findings"] if host in one["where"]["hosts"]]
        return dict(found)


def reach(
    client: Node,
    hosts: str,
    *,
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
    timeout: float = 100,
    **more: object,
) -> Reached:
    """Reach hosts from the client and let each go; `more` are fields of Cluster, `within` goes before the program."""
    done = run_script(client.command(*within, *_command(hosts, more)), _environment(env), timeout)
    assert (done.returncode, done.stderr) == (0, "")
    return Reached(json.loads(done.stdout))


def start_reaching(client: Node, hosts: str, **more: object) -> subprocess.Popen[str]:
    """Begin to reach hosts; it says "up" when all are there or given up, and keeps them until it is ended."""
    return subprocess.Popen(
        client.command(*_command(hosts, more), "stay"),
        env=_environment(None),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _command(hosts: str, more: Mapping[str, object]) -> list[str]:
    return [sys.executable, _PROGRAM, json.dumps({"hosts": hosts, **more})]


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "SSH_AUTH_SOCK": "", **(more or {})}
