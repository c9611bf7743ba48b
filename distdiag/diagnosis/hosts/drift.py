"""Differences between hosts: equal facts fold into one, and the few deviating hosts are named. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, fold_within
from distdiag.fold import by_key
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@record(kw_only=True)
class Difference:
    """A fact with different values: the most common value, and each other value with its hosts."""

    fact: str
    common: str
    common_hosts: tuple[str, ...]
    others: tuple[tuple[str, tuple[str, ...]], ...]
    """(value, hosts), rarest value first."""

    @property
    def odd_hosts(self) -> tuple[str, ...]:
        """Hosts without the common value."""
        return tuple(host for _, hosts in self.others for host in hosts)

    def __str__(self) -> str:
        odd = "; ".join(f"{value} on {fold(hosts)}" for value, hosts in self.others)
        return f"{self.fact}: {odd}; {self.common} on {fold_within(self.common_hosts, 160)}"


def differences(facts: Mapping[str, Mapping[str, object]]) -> tuple[Difference, ...]:
    """Compare facts by name over all hosts; an absent fact counts as "none".

    In a tie the value of the first host counts as the common one.
    """
    names = dict.fromkeys(name for own in facts.values() for name in own)
    found = []
    for name in names:
        values = ((own.get(name), host) for host, own in facts.items())
        groups = by_key(("none" if value is None else str(value), host) for value, host in values)
        if len(groups) > 1:
            found.append(_difference(name, groups))
    return tuple(found)


def _difference(name: str, groups: dict[str, list[str]]) -> Difference:
    common = max(groups, key=lambda value: len(groups[value]))  # the first of equals
    others = [(value, tuple(hosts)) for value, hosts in groups.items() if value != common]
    others.sort(key=lambda entry: len(entry[1]))
    return Difference(fact=name, common=common, common_hosts=tuple(groups[common]), others=tuple(others))


def grouped(numbers: Mapping[str, float], tolerance: float, write: Callable[[float], str]) -> dict[str, str]:
    """Return the name of each host's cluster; nearly equal numbers form one cluster.

    Args:
        numbers: by host.
        tolerance: largest gap between neighbours in a cluster, relative to the larger one.
        write: formats a number; a cluster is named after both of its ends if their texts differ.
    """
    clusters: list[list[str]] = []
    last = 0.0
    for host in sorted(numbers, key=lambda host: numbers[host]):
        if not clusters or numbers[host] - last > tolerance * abs(numbers[host]):
            clusters.append([])
        clusters[-1].append(host)
        last = numbers[host]
    names = {}
    for cluster in clusters:
        low, high = write(numbers[cluster[0]]), write(numbers[cluster[-1]])
        names.update(dict.fromkeys(cluster, low if low == high else f"{low} to {high}"))
    return names
