"""Match the two ends of connections among sockets of several processes on several nodes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.facts.network.interfaces import is_loopback
from distdiag.facts.network.socket_owners import Owned
from distdiag.fold import by_key
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ANY = ("0.0.0.0", "::")


@record
class Endpoint(Owned):
    """A process's socket on a host. `network`: its network namespace, whose name is only unique there."""

    host: str
    network: str

    @property
    def key(self) -> tuple[str, int, int]:
        """Its identity: (host, pid, inode)."""
        return self.host, self.pid, self.inode

    @property
    def place(self) -> tuple[str, str]:
        """The scope of its addresses: (host, network namespace)."""
        return self.host, self.network


def match(
    endpoints: Iterable[Endpoint], addresses: Mapping[tuple[str, str], Iterable[str]]
) -> dict[tuple[str, int, int], tuple[Endpoint, ...]]:
    """Find the other end of each endpoint, by key; empty if it is not among them, or behind NAT.

    Several processes may share one socket (fork). A connection not accepted yet matches its listener. Private addresses
    may exist several times: the same namespace is preferred, then the same host; among equals all are returned.

    Args:
        endpoints: the sockets of all processes examined.
        addresses: by (host, network namespace), its own addresses, see sockets.Namespace.
    """
    targets = list(endpoints)
    connected = by_key(((_family(each), each.local, each.remote), each) for each in targets if each.remote)
    idle = (each for each in targets if each.local and not each.remote)
    bound = by_key(((_family(each), _split(each.local)[1]), each) for each in idle)
    own = {place: frozenset(known) for place, known in addresses.items()}
    return {endpoint.key: tuple(_others(endpoint, connected, bound, own)) for endpoint in targets}


def _others(
    endpoint: Endpoint,
    connected: dict[tuple[str, str, str], list[Endpoint]],
    bound: dict[tuple[str, str], list[Endpoint]],
    own: dict[tuple[str, str], frozenset[str]],
) -> list[Endpoint]:
    if not endpoint.remote:
        return []
    exact = connected.get((_family(endpoint), endpoint.remote, endpoint.local), [])
    found = _nearest(endpoint, exact, own)
    if found:
        return found
    address, port = _split(endpoint.remote)
    listeners = [other for other in bound.get((_family(endpoint), port), []) if _takes(other, address, own)]
    return _nearest(endpoint, listeners, own)


def _nearest(
    endpoint: Endpoint, candidates: list[Endpoint], own: dict[tuple[str, str], frozenset[str]]
) -> list[Endpoint]:
    """Keep the nearest candidates; none elsewhere if the address is loopback, or this namespace's own."""
    address, _ = _split(endpoint.remote)
    here = [other for other in candidates if other.place == endpoint.place]
    if here or is_loopback(address) or address in own.get(endpoint.place, ()):
        return here
    return [other for other in candidates if other.host == endpoint.host] or candidates


def _takes(listener: Endpoint, address: str, own: dict[tuple[str, str], frozenset[str]]) -> bool:
    """Return whether a listener, by the address it is bound to, accepts connections to this address."""
    bound_to, _ = _split(listener.local)
    if bound_to not in _ANY:
        return bound_to == address
    if bound_to == "0.0.0.0" and ":" in address:
        return False
    return is_loopback(address) or address in own.get(listener.place, ())


def _family(endpoint: Endpoint) -> str:
    """An IPv6 socket may use IPv4, so the table does not tell the families apart; the addresses do."""
    return endpoint.protocol.rstrip("6")


def _split(end: str) -> tuple[str, str]:
    address, _, port = end.rpartition(":")
    return address.strip("[]"), port
