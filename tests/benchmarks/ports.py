"""ports beside nmap: the ports of a host in another network namespace; and 16 nodes among each other.

Needs root (network namespaces) and nmap. Interleaved, medians, ratios.
"""

from __future__ import annotations

import re
import shutil
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import Network
from support import distdiag

ROUNDS = 7
SCAN = (
    "import sys, time; from distdiag.facts import port_scan; b = time.monotonic(); "
    "n = len(list(port_scan.scan([(sys.argv[1], p) for p in range(1, int(sys.argv[2]) + 1)], timeout_s=3.2))); "
    "print(time.monotonic() - b, n)"
)


def seconds(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


def beside_nmap(network: Network, name: str, count: int, rounds: int) -> None:
    """Scan so many ports: whole commands, and the scans alone as both measure them."""
    client, address = network.client, network.nodes[0].address
    whole: dict[str, list[float]] = {"distdiag": [], "nmap": []}
    alone: dict[str, list[float]] = {"distdiag": [], "nmap": []}
    for _ in range(rounds):
        began = time.monotonic()
        result = distdiag(
            "ports", "--json", address, "--port", f"1-{count}", wrap=tuple(client.command()), env=network.client_env()
        )
        whole["distdiag"].append(time.monotonic() - began)
        assert len(result.report["data"]["probes"]) == count
        began = time.monotonic()
        said = client.run("nmap", "-sT", "-Pn", "-n", "-p", f"1-{count}", address, timeout=600).stdout
        whole["nmap"].append(time.monotonic() - began)
        alone["nmap"].append(seconds(said, r"scanned in ([\d.]+) seconds"))
        alone["distdiag"].append(
            float(client.run(sys.executable, "-c", SCAN, address, str(count), timeout=120).stdout.split()[0])
        )
    for what, figures in (("whole command", whole), ("the scan alone", alone)):
        own, peer = (statistics.median(figures[who]) for who in ("distdiag", "nmap"))
        print(f"{count} ports {name}, {what}: {own:.2f} s, nmap -sT {peer:.2f} s: ratio {own / peer:.2f}")


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
        pairs = {(row["from"], row["to"]) for row in result.report["data"]["pairs"]}
        state = "one way dropped" if broken else "all open"
        took = statistics.median(times)
        print(f"{nodes} nodes, {len(pairs)} directed pairs, {state}: {took:.1f} s (exit {result.code})")


def main() -> None:
    """Measure."""
    if shutil.which("nmap") is None:
        sys.exit("nmap is not installed: apt-get install nmap")
    with Network(1) as network:
        beside_nmap(network, "closed", 1000, ROUNDS)
        network.nodes[0].drop(*range(1, 1001))
        beside_nmap(network, "dropped", 100, 2)
    all_pairs(4, broken=False)
    all_pairs(16, broken=False)
    all_pairs(16, broken=True)


if __name__ == "__main__":
    main()
