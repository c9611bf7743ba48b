"""Sockets of a network namespace, from /proc/PID/net: see proc(5), and include/net/tcp_states.h.

/proc/PID/net is that of the process's own namespace, and world-readable; only a process's descriptors show which
sockets it has.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from dataclasses import replace

from distdiag.facts import machine
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_STATES = (
    *("", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT"),
    *("LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV", "BOUND_INACTIVE"),
)
_TIMERS = ("", "retransmit", "keepalive", "time-wait", "zero-window-probe")
_UNIX_STATES = ("FREE", "UNCONNECTED", "CONNECTING", "ESTABLISHED", "DISCONNECTING")  # include/uapi/linux/net.h
_UNIX_LISTENS = 0x10000
MAPPED = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4-mapped IPv6 address."""
_TABLES = ("tcp", "tcp6", "udp", "udp6")
# include/uapi/linux/netlink.h, sock_diag.h and unix_diag.h
_SOCK_DIAG, _BY_FAMILY, _DUMP_REQUEST, _SHOW_PEER, _PEER = 4, 20, 0x301, 0x4, 2
_DONE = (2, 3)
"""NLMSG_ERROR, NLMSG_DONE."""


@record
class Socket:
    """One socket; fields unknown to the kernel are None or empty.

    `local` and `remote`: "10.0.0.2:29500", "[::1]:29500"; `remote` is empty if not connected; for a unix socket the
    path, "@..." if abstract. Queues as counted by the kernel, for UDP with its own overhead. `backlog`: connections not
    accepted yet. `retransmits`: of the oldest unacknowledged segment. `timer`: "retransmit", "keepalive", "time-wait",
    or "zero-window-probe" (the peer does not read). `peer_inode`: the other end of a unix socket, only in our own
    namespace, and once accepted.
    """

    inode: int
    protocol: str
    state: str
    local: str = ""
    remote: str = ""
    send_queue_bytes: int | None = None
    receive_queue_bytes: int | None = None
    backlog: int | None = None
    retransmits: int | None = None
    timer: str = ""
    peer_inode: int | None = None


@record
class Namespace:
    """One network namespace: its sockets by inode, and its own addresses, loopback included."""

    sockets: dict[int, Socket]
    addresses: tuple[str, ...]


class Tables:
    """Network namespaces, each read once."""

    def __init__(self) -> None:
        self._known: dict[str, Namespace] = {}

    def of(self, pid: int) -> Namespace:
        """Return the network namespace of a process; empty if it exited."""
        name = (
            machine.network_namespace(pid) or f"of {pid}"
        )  # a hidden namespace may be a known one, and is then read twice
        if name not in self._known:
            self._known[name] = _read(pid, ours=name == machine.network_namespace(os.getpid()))
        return self._known[name]


def inodes(pid: int) -> set[int]:
    """List the inodes of a process's open sockets."""
    folder = f"/proc/{pid}/fd"
    links = (machine.link_target(f"{folder}/{fd}") for fd in machine.names_in(folder))
    return {int(link[len("socket:[") : -1]) for link in links if link.startswith("socket:[")}


def tcp_table(pid: int) -> dict[int, Socket]:
    """Read the TCP sockets of a process's network namespace, by inode."""
    tables = (parse_inet(machine.read_text(f"/proc/{pid}/net/{name}"), name) for name in ("tcp", "tcp6"))
    return {inode: sock for table in tables for inode, sock in table.items()}


class TcpTables:
    """The TCP sockets of network namespaces, each read once: the kernel takes 10 ms and more for one."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int, Socket]] = {}

    def sockets(self, pid: int) -> list[Socket]:
        """List the TCP sockets of a process, by inode."""
        name = machine.network_namespace(pid) or f"of {pid}"
        if not self._known.get(name):  # empty: perhaps that process has just ended
            self._known[name] = tcp_table(pid)
        table = self._known[name]
        return [table[inode] for inode in sorted(inodes(pid) & table.keys())]


def stuck(pid: int) -> list[dict[str, object]]:
    """List a process's TCP connections with an unresponsive peer, as records.StuckSocket."""
    return [
        {
            "remote": sock.remote,
            "state": sock.state,
            "retransmits": sock.retransmits or 0,
            "unanswered_bytes": sock.send_queue_bytes or 0,
        }
        for sock in TcpTables().sockets(pid)
        if sock.remote and (sock.state == "SYN_SENT" or (sock.retransmits or 0) > 1)
    ]


def parse_inet(text: str, protocol: str) -> dict[int, Socket]:
    """Parse /proc/PID/net/{tcp,tcp6,udp,udp6}, without sockets no longer owned by a process (inode 0)."""
    rows = (line.split() for line in text.splitlines()[1:])
    found = (_inet(columns, protocol) for columns in rows if len(columns) > 9 and columns[9] != "0")
    return {sock.inode: sock for sock in found}


def parse_unix(text: str) -> dict[int, Socket]:
    """Parse /proc/PID/net/unix; the kernel writes no queues there."""
    found = {}
    for line in text.split("\n")[1:]:
        # Num RefCount Protocol Flags Type St Inode Path: a path may contain any character, even a newline.
        columns = line.split(None, 7)
        if len(columns) < 7 or not columns[0].endswith(":"):
            continue
        try:
            flags, number, inode = int(columns[3], 16), int(columns[5], 16), int(columns[6])
        except ValueError:  # the rest of a path
            continue
        state = "LISTEN" if flags & _UNIX_LISTENS else _name(_UNIX_STATES, number)
        found[inode] = Socket(inode, "unix", state, local=columns[7] if len(columns) > 7 else "")
    return found


def parse_addresses(fib_trie: str, if_inet6: str) -> tuple[str, ...]:
    """Parse a namespace's own addresses from /proc/PID/net/fib_trie and if_inet6."""
    found = re.findall(r"\|-- (\S+)\n(?: +/\d+ .*\n)*? +/32 host LOCAL", fib_trie)
    for line in if_inet6.splitlines():
        found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return tuple(dict.fromkeys(found))


def unix_peers() -> dict[int, int]:
    """Query the connected unix sockets of our own network namespace: inode to inode, both ways."""
    query = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_PEER, 0, 0)
    found = {}
    with contextlib.suppress(OSError), diag_socket() as kernel:
        for message in dump(kernel, query):
            peer = attribute(message[16:], _PEER)
            if peer is not None:
                found[struct.unpack_from("=I", message, 4)[0]] = struct.unpack("=I", peer)[0]
        return found
    return {}  # a kernel without unix_diag, or a sandbox without netlink


def diag_socket() -> socket.socket:
    """Open a sock_diag(7) socket in the calling thread's network namespace. Raises OSError in some sandboxes."""
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
    kernel.settimeout(1.0)
    return kernel


def dump(kernel: socket.socket, query: bytes) -> Iterator[bytes]:
    """Send a dump request of sock_diag(7); yield the answers without their netlink headers. Raises OSError."""
    kernel.send(struct.pack("=IHHII", 16 + len(query), _BY_FAMILY, _DUMP_REQUEST, 1, 0) + query)
    while True:
        data = kernel.recv(65536)
        while len(data) >= 16:
            length, kind = struct.unpack_from("=IH", data)
            if kind in _DONE or length < 16:
                return
            yield data[16:length]
            data = data[(length + 3) & ~3 :]


def attribute(data: bytes, wanted: int) -> bytes | None:
    """Find the payload of one netlink attribute; None if absent."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if kind == wanted:
            return data[4:length]
        data = data[(max(length, 4) + 3) & ~3 :]
    return None


def _read(pid: int, *, ours: bool) -> Namespace:
    folder = f"/proc/{pid}/net"
    found = parse_unix(machine.read_text(f"{folder}/unix"))
    for inode, peer in unix_peers().items() if ours and found else ():
        if inode in found and peer in found:
            found[inode] = replace(found[inode], peer_inode=peer, remote=found[peer].local)
    for table in _TABLES:
        found.update(parse_inet(machine.read_text(f"{folder}/{table}"), table))
    own = parse_addresses(machine.read_text(f"{folder}/fib_trie"), machine.read_text(f"{folder}/if_inet6"))
    return Namespace(found, own)


def _inet(columns: list[str], protocol: str) -> Socket:
    """Parse: sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode ..."""
    tcp = protocol.startswith("tcp")
    state = _name(_STATES, int(columns[3], 16))
    sends, receives = (int(queue, 16) for queue in columns[4].split(":"))
    listens = tcp and state == "LISTEN"
    remote = _end(columns[2])
    return Socket(
        inode=int(columns[9]),
        protocol=protocol,
        state=state if tcp or remote else "UNCONNECTED",
        local=_end(columns[1], always=True),
        remote=remote,
        send_queue_bytes=None if listens else sends,
        receive_queue_bytes=None if listens else receives,
        backlog=receives if listens else None,
        retransmits=int(columns[6], 16) if tcp else None,
        timer=_name(_TIMERS, int(columns[5].partition(":")[0], 16)) if tcp else "",
    )


def _end(text: str, *, always: bool = False) -> str:
    """Parse the kernel's ADDRESS:PORT: words in the machine's byte order. Port 0: empty, unless `always`."""
    address, port = text.split(":")
    if int(port, 16) == 0 and not always:
        return ""
    words = struct.pack(f"={len(address) // 8}I", *(int(address[at : at + 8], 16) for at in range(0, len(address), 8)))
    if words.startswith(MAPPED):
        words = words[len(MAPPED) :]
    if len(words) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, words)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, words)}]:{int(port, 16)}"


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else str(number)
