"""Reaches hosts as every command does, without starting ranks, and tells what became of them.

Arguments: the fields of Cluster as JSON; then "stay" keeps the agents up until this program is ended.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

from distdiag.cluster.start_fleet import Agent, open_fleet
from distdiag.cluster.targets import Cluster, find_targets
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.launch.collect import Ask
from distdiag.launch.types import NodeFacts


def largest_rss_mib() -> int:
    # Not getrusage: that one remembers who forked us.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


_AGENT = Agent(collect="distdiag.launch.collect", facts=NodeFacts, ask=Ask(gpus=False))


def main() -> None:
    cluster = Cluster(**json.loads(sys.argv[1]))
    targets = find_targets(cluster, os.environ)
    stay = sys.argv[2:] == ["stay"]
    began, began_with_mib = time.monotonic(), largest_rss_mib()
    with open_fleet(cluster, targets, _AGENT) as fleet:
        fleet.gather(lambda fleet: None, close=not stay)
        gathered_s = time.monotonic() - began
        if stay:
            print("up", flush=True)
            while True:
                list(fleet.records(1))
    told = {
        "rows": [asdict(row) for row in fleet.rows],
        "findings": [asdict(one) for one in host_findings(fleet.refusals, fleet.rows)],
        "duplicates": targets.duplicates,
        "machines": {name: node.hello.machine for name, node in fleet.nodes.items()},
        "seconds": gathered_s,
        "seconds_to_close": time.monotonic() - began - gathered_s,
        "rss_mib": largest_rss_mib(),
        "grown_mib": largest_rss_mib() - began_with_mib,
        "cpu_s": sum(os.times()[:2]),
    }
    json.dump(told, sys.stdout)


main()
