"""Total bytes of each TCP connection of a network namespace, from sock_diag(7): /proc/net/tcp has no totals.

Layouts: include/uapi/linux/inet_diag.h (inet_diag_req_v2, inet_diag_msg) and linux/tcp.h (tcp_info).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

from distdiag.facts import deadlines, machine
from distdiag.facts.network import sockets
from distdiag.record import record

_INFO = 2  # INET_DIAG_INFO
_STATES = sum(1 << state for state in (1, 4, 5, 8))
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2 and CLOSE_WAIT: data may still be in transit."""
_MESSAGE = struct.Struct("=BBBB2s2s16s16s12xIIIII")
"""family state timer retransmits, ports and addresses, (interface, cookie), expires rqueue wqueue uid inode."""
_TOTALS_AT = 120
"""Offset in tcp_info of tcpi_bytes_acked; tcpi_bytes_received follows (Linux 4.1)."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_PATIENCE_S = 1.0


@record
class TcpBytes:
    """One connection. `taken`: bytes read by its process; `sent`: bytes acknowledged by the peer.

    `local` and `remote`: "10.0.0.2:443", "[::1]:443", as in facts.sockets.
    """

    inode: int
    local: str
    remote: str
    taken: int
    sent: int


def tcp_bytes(pid: int) -> dict[int, TcpBytes]:
    """Read the connections of a process's network namespace, by inode. Raises OSError.

    A temporary thread enters a namespace other than ours; that needs CAP_SYS_ADMIN.
    """
    if machine.network_namespace(pid) == machine.network_namespace(os.getpid()):
        return _connections()
    results, _ = deadlines.together({pid: lambda: _entered(pid)}, patience_s=_PATIENCE_S)
    if pid not in results:
        raise TimeoutError("its network namespace did not answer")
    return results[pid]


def _entered(pid: int) -> dict[int, TcpBytes]:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(namespace)
    return _connections()


def _connections() -> dict[int, TcpBytes]:
    found = {}
    with sockets.diag_socket() as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            query = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES)
            for message in sockets.dump(kernel, query):
                connection = _parse(message)
                if connection is not None:
                    found[connection.inode] = connection
    return found


def _parse(message: bytes) -> TcpBytes | None:
    if len(message) < _MESSAGE.size:
        return None
    family, _, _, _, sport, dport, source, target, _, unread, _, _, inode = _MESSAGE.unpack_from(message)
    info = sockets.attribute(message[_MESSAGE.size :], _INFO) or b""
    if not inode or len(info) < _TOTALS_AT + 16:
        return None
    acked, received = struct.unpack_from("=QQ", info, _TOTALS_AT)
    local, remote = _end(family, source, sport), _end(family, target, dport)
    return TcpBytes(inode, local, remote, max(0, received - unread), acked)


def _end(family: int, address: bytes, port: bytes) -> str:
    number = int.from_bytes(port, "big")
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(family, address[:4])}:{number}"
    if address.startswith(sockets.MAPPED):
        return f"{socket.inet_ntop(socket.AF_INET, address[12:])}:{number}"
    return f"[{socket.inet_ntop(family, address)}]:{number}"
