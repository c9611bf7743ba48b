"""ports: 4 and 16 nodes among each other, all open and with one direction dropped. Needs root (network namespaces)."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import Network
from support import distdiag


def all_pairs(nodes: int, *, broken: bool) -> None:
    """Let all nodes try each other."""
    with Network(nodes) as network:
        if broken:
            source = network.nodes[0].address
            network.nodes[-1].at_switch(f"ip saddr {source} tcp flags & (syn | ack) == syn drop", "in")
        times = []
        for _ in range(5):
            began = time.monotonic()
            result = distdiag(
                *("ports", "--json", "--hosts", network.hosts, "--via", network.via),
                wrap=tuple(network.client.command()),
                env=network.client_env(),
            )
            times.append(time.monotonic() - began)
        pairs = {(row["source"], row["target"]) for row in result.report["data"]["pairs"]}
        state = "one way dropped" if broken else "all open"
        took = statistics.median(times)
        print(f"{nodes} nodes, {len(pairs)} directed pairs, {state}: {took:.1f} s (exit {result.code})")


def main() -> None:
    """Measure."""
    all_pairs(4, broken=False)
    all_pairs(16, broken=False)
    all_pairs(16, broken=True)


if __name__ == "__main__":
    main()
