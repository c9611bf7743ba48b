"""Who is at the other end of a connection, when the sockets of several processes on several nodes are known. Pure."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Endpoint:
    """A socket that a process has. `network` is its network namespace, whose name means something on its host alone.

    The rest is as distdiag.facts.sockets tells it: "tcp6", "ESTABLISHED", "10.0.0.2:29500"; `remote` may be empty.
    """

    host: str
    network: str
    pid: int
    inode: int
    protocol: str
    state: str
    local: str
    remote: str

    @property
    def key(self) -> tuple[str, int, int]:
        """What it is called: (host, pid, inode)."""
        return self.host, self.pid, self.inode

    @property
    def place(self) -> tuple[str, str]:
        """Where its addresses mean something: (host, network namespace)."""
        return self.host, self.network


def match(
    endpoints: Iterable[Endpoint], addresses: Mapping[tuple[str, str], Iterable[str]]
) -> dict[tuple[str, int, int], tuple[Endpoint, ...]]:
    """Find for each endpoint, by its key, who has the other end; nobody if that is not among them, or behind NAT.

    Several processes may have one socket (fork). A connection that its listener has not accepted yet matches the
    listener. Private addresses may exist several times: the same namespace goes before the same host, and this before
    others; among equals all are given.

    Args:
        endpoints: the sockets of all processes that are looked at.
        addresses: by (host, network namespace) the addresses that are its own, see sockets.Namespace.
    """
    everybody = list(endpoints)
    connected: dict[tuple[str, str, str], list[Endpoint]] = {}
    bound: dict[tuple[str, str], list[Endpoint]] = {}
    for endpoint in everybody:
        if endpoint.remote:
            connected.setdefault((_family(endpoint), endpoint.local, endpoint.remote), []).append(endpoint)
        elif endpoint.local:
            bound.setdefault((_family(endpoint), _split(endpoint.local)[1]), []).append(endpoint)
    own = {place: frozenset(known) for place, known in addresses.items()}
    return {endpoint.key: tuple(_others(endpoint, connected, bound, own)) for endpoint in everybody}


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
    """Keep those that are nearest; none elsewhere if the address is loopback, or this namespace's own."""
    address, _ = _split(endpoint.remote)
    here = [other for other in candidates if other.place == endpoint.place]
    if here or _is_loopback(address) or address in own.get(endpoint.place, ()):
        return here
    return [other for other in candidates if other.host == endpoint.host] or candidates


def _takes(listener: Endpoint, address: str, own: dict[tuple[str, str], frozenset[str]]) -> bool:
    """Tell whether connections to this address may end at a listener, by the address that it is bound to."""
    bound_to, _ = _split(listener.local)
    if bound_to not in _ANY:
        return bound_to == address
    if bound_to == "0.0.0.0" and ":" in address:
        return False
    return _is_loopback(address) or address in own.get(listener.place, ())


def _family(endpoint: Endpoint) -> str:
    """An IPv6 socket may speak IPv4: the addresses tell them apart, not the table."""
    return endpoint.protocol.rstrip("6")


def _split(end: str) -> tuple[str, str]:
    address, _, port = end.rpartition(":")
    return address.strip("[]"), port


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
