"""What descriptors stand for in a log without -y: kept from the calls that make them, for each process on its own."""

from __future__ import annotations

import re

from distdiag.node.strace import lines, targets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.node.strace.lines import Line

_OPENED = re.compile(rb"(?:(AT_FDCWD|\d+)(?:" + lines.DECODED + rb")?, )?(" + lines.STRING + rb")")
_PAIR = re.compile(rb"\[(\d+), (\d+)\]")
_NUMBER = re.compile(rb"\d+")
_OPENS = (b"open", b"openat", b"openat2", b"creat")
_MAKES = {
    **{b"accept": b"TCP:[]", b"accept4": b"TCP:[]", b"memfd_create": b"memfd:[]"},
    **{b"epoll_create": b"anon_inode:[eventpoll]", b"epoll_create1": b"anon_inode:[eventpoll]"},
    **{b"eventfd": b"anon_inode:[eventfd]", b"eventfd2": b"anon_inode:[eventfd]"},
}
_PAIRS = {b"pipe": b"pipe:[]", b"pipe2": b"pipe:[]", b"socketpair": b"UNIX:[]"}
_COPIES = (b"dup", b"dup2", b"dup3", b"fcntl")
CHANGES = frozenset({*_OPENS, *_MAKES, *_PAIRS, *_COPIES, b"socket", b"connect", b"close"})
"""The calls after which a descriptor stands for something else."""
CLONES = (b"clone", b"clone3", b"fork", b"vfork")
_MOST = 8192
"""Of the descriptors of a process that were never seen closed: more are forgotten."""
_MOST_OF_ALL = 32 * _MOST
"""Of all processes, most of which ended long ago."""
_HEADS = 4096


class _Table:
    """The descriptors of a process, which its threads share; and the heads of calls that were written with them."""

    def __init__(self, fds: dict[bytes, bytes]) -> None:
        self.fds = fds
        self.named: dict[bytes, bytes] = {}


class Descriptors:
    """Which descriptors are open to each thread, as far as the log tells."""

    def __init__(self) -> None:
        self._tables: dict[bytes, _Table] = {}
        self._copied = 0

    def named(self, tid: bytes, head: bytes) -> bytes:
        """Write the head of a call (lines.HEAD) as -y would have done."""
        table = self._tables.get(tid)
        if table is None:
            return head
        found = table.named.get(head)
        if found is None:
            if len(table.named) >= _HEADS:
                table.named.clear()
            name, _, rest = head.partition(b"(")
            found = table.named[head] = name + b"(" + self.args(tid, name, rest)
        return found

    def args(self, tid: bytes, name: bytes, args: bytes) -> bytes:
        """Write the arguments of a call as -y would have done."""
        fd = _NUMBER.match(args)
        table = self._tables.get(tid)
        if (
            not fd
            or not table
            or not table.fds
            or args[fd.end() : fd.end() + 1] not in (b"", b",")
            or not targets.has_descriptor(name)
        ):
            return args
        what = table.fds.get(fd[0])
        return args if what is None else fd[0] + b"<" + what + b">" + args[fd.end() :]

    def note(self, tid: bytes, line: Line) -> None:
        """Learn from a call that ended."""
        if line.error or not line.result:
            return
        name, result = line.name, line.result.partition(b" ")[0].partition(b"<")[0]
        table = self._tables.get(tid)
        if table is None:
            table = self._tables[tid] = _Table({})
        if name in CLONES:
            self._born(table, result, shares=b"CLONE_FILES" in line.args)
        elif name in CHANGES:
            _change(table.fds, name, line.args, result)
            if len(table.fds) > _MOST:
                table.fds.clear()
            table.named.clear()

    def same(self, tid: bytes, other: bytes) -> None:
        """Learn that two names are of one thread."""
        if tid in self._tables:
            self._tables[other] = self._tables[tid]

    def _born(self, parent: _Table, child: bytes, *, shares: bool) -> None:
        if shares:
            self._tables[child] = parent
            return
        self._copied += len(parent.fds)
        if self._copied > _MOST_OF_ALL:
            self._copied = 0
            self._tables = {tid: its for tid, its in self._tables.items() if its is parent}
        before = self._tables.get(child)
        self._tables[child] = _Table({**parent.fds, **before.fds} if before else dict(parent.fds))


def _change(table: dict[bytes, bytes], name: bytes, args: bytes, result: bytes) -> None:
    fds = _NUMBER.findall(args)
    if name in _OPENS:
        opened = _OPENED.match(args)
        if opened:
            path, folder = opened[2][1:-1], table.get(opened[1] or b"", b"")
            table[result] = folder + b"/" + path if folder and not path.startswith(b"/") else path
    elif name in _MAKES or name == b"socket":
        table[result] = _MAKES.get(name) or _socket(args)
    elif name == b"close" and fds:
        table.pop(fds[0], None)
    elif name in _PAIRS:
        pair = _PAIR.search(args)
        for fd in pair.groups() if pair else ():
            table[fd] = _PAIRS[name]
    elif name in _COPIES and fds and (name != b"fcntl" or b"F_DUPFD" in args):
        if fds[0] in table:
            table[result] = table[fds[0]]
    elif name == b"connect":
        kind = table.get(fds[0], b"socket:").partition(b":")[0]
        table[fds[0]] = kind + b":[->" + targets.about(name, args)[1].encode() + b"]"


def _socket(args: bytes) -> bytes:
    family = args.partition(b",")[0].partition(b"_")[2]
    if family in (b"INET", b"INET6"):
        return (b"TCP" if b"SOCK_STREAM" in args else b"UDP") + (b"v6:[]" if family == b"INET6" else b":[]")
    return family + b":[]"
