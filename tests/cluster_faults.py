"""Faults of one node's cable: made at the switch, where no program of the node can see them, or in its own firewall."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Direction = Literal["in", "out", "both"]
"""Towards the node, from it, or both ways."""


@dataclass(frozen=True, kw_only=True)
class Cable:
    """Where a node is plugged in."""

    switch_pid: int
    port: str


class Faults:
    """Faults between a node and the switch; the node's own traffic to itself is never touched."""

    def __init__(self, cable: Cable, pid: int) -> None:
        self.cable = cable
        self.pid = pid
        self._hurt: set[str] = set()

    def drop(self, *ports: int, direction: Direction = "in") -> None:
        """Drop TCP packets to these ports: of this node (in), or of other nodes if sent from here (out)."""
        self.at_switch(f"tcp dport {nft_set(ports)} drop", direction)

    def drop_ephemeral(self, *open_ports: int) -> None:
        """Let no new TCP connection in, but to these ports."""
        syn = "tcp flags & (syn | ack) == syn"
        self.at_switch(f"{syn} tcp dport != {nft_set(open_ports)} drop" if open_ports else f"{syn} drop", "in")

    def reject(self, *ports: int, how: Literal["rst", "admin-prohibited"] = "rst") -> None:
        """Answer TCP to these ports as the node's own firewall would."""
        answer = "with tcp reset" if how == "rst" else "with icmpx type admin-prohibited"
        self.in_firewall("input", "type filter hook input priority 0;", f"tcp dport {nft_set(ports)} reject {answer}")

    def mtu_black_hole(self, over_bytes: int = 1000, *, direction: Direction = "both") -> None:
        """Drop longer packets silently."""
        self.at_switch(f"meta length > {over_bytes} drop", direction)

    def loss(self, percent: int, *, direction: Direction = "both") -> None:
        """Lose this share of the IP packets each way; a lost ARP request would delay all nodes by a second."""
        self.at_switch(f"meta protocol ip numgen random mod 100 < {percent} drop", direction)

    def limit_rate(self, rate: str) -> None:
        """Let no more than this through each way, as a port at a lower speed: "100mbit". Nothing is lost."""
        self._hurt.add("rate")
        self._tc("add", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "800ms")

    def vanish(self) -> None:
        """Swallow everything but ARP: as a machine behind a router that died. Connections to it time out."""
        self.at_switch("meta protocol != arp drop", "both")

    def unplug(self) -> None:
        """Pull the cable: neighbours that did not talk to it lately get "No route to host" after 3 s."""
        self._hurt.add("cable")
        self._ip("down")

    def heal(self) -> None:
        """Undo all faults of this node."""
        if "switch" in self._hurt:
            self._nft(self.cable.switch_pid, f"delete table netdev faults_{self.cable.port}")
        if "firewall" in self._hurt:
            self._nft(self.pid, "delete table inet faults")
        if "rate" in self._hurt:
            self._tc("del", "root")
        if "cable" in self._hurt:
            self._ip("up")
        self._hurt.clear()

    def at_switch(self, rule: str, direction: Direction) -> None:
        """Add an nft rule for traffic through this node's port."""
        self._hurt.add("switch")
        # From the switch's side, traffic to the node is egress.
        hooks = {"in": ["egress"], "out": ["ingress"], "both": ["ingress", "egress"]}[direction]
        table = f"netdev faults_{self.cable.port}"
        lines = [f"add table {table}"]
        for hook in hooks:
            kind = f'type filter hook {hook} device "{self.cable.port}" priority 0;'
            lines.append(f"add chain {table} {hook} {{ {kind} }}")
            lines.append(f"add rule {table} {hook} {rule}")
        self._nft(self.cable.switch_pid, *lines)

    def in_firewall(self, chain: str, kind: str, rule: str) -> None:
        """Add an nft rule of the node's own for traffic from the cable."""
        self._hurt.add("firewall")
        self._nft(
            self.pid,
            "add table inet faults",
            f"add chain inet faults {chain} {{ {kind} }}",
            f'add rule inet faults {chain} iifname "eth0" {rule}',
        )

    def _nft(self, pid: int, *lines: str) -> None:
        command = ["nsenter", "-t", str(pid), "-n", "nft", "-f", "-"]
        subprocess.run(command, input="\n".join([*lines, ""]), text=True, check=True, timeout=20)

    def _tc(self, action: str, *words: str) -> None:
        """Change the queue at both ends of the cable: each limits its own sending."""
        for pid, device in ((self.pid, "eth0"), (self.cable.switch_pid, self.cable.port)):
            command = ["nsenter", "-t", str(pid), "-n", "tc", "qdisc", action, "dev", device, *words]
            subprocess.run(command, check=True, timeout=20)

    def _ip(self, state: str) -> None:
        command = ["nsenter", "-t", str(self.cable.switch_pid), "-n", "ip", "link", "set", self.cable.port, state]
        subprocess.run(command, check=True, timeout=20)


def nft_set(values: Iterable[object]) -> str:
    """Write a set as nft takes it."""
    return "{ " + ", ".join(map(str, values)) + " }"
