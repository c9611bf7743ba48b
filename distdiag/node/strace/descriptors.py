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
_MOST = 65536
"""Of descriptors that were never seen closed (processes that ended): more are forgotten."""


class Descriptors:
    """Which descriptors are open to each thread, as far as the log tells."""

    def __init__(self) -> None:
        self._tables: dict[bytes, dict[bytes, bytes]] = {}
        self._named: dict[bytes, dict[bytes, bytes]] = {}

    def named(self, tid: bytes, head: bytes) -> bytes:
        """Write the head of a call (lines.HEAD) as -y would have done."""
        known = self._named.setdefault(tid, {})
        found = known.get(head)
        if found is None:
            name, _, rest = head.partition(b"(")
            found = known[head] = name + b"(" + self.args(tid, name, rest)
        return found

    def args(self, tid: bytes, name: bytes, args: bytes) -> bytes:
        """Write the arguments of a call as -y would have done."""
        fd = _NUMBER.match(args)
        table = self._tables.get(tid)
        if not fd or not table or args[fd.end() : fd.end() + 1] not in (b"", b",") or not targets.has_descriptor(name):
            return args
        what = table.get(fd[0])
        return args if what is None else fd[0] + b"<" + what + b">" + args[fd.end() :]

    def note(self, tid: bytes, line: Line) -> None:
        """Learn from a call that ended."""
        if line.error or not line.result:
            return
        name, result = line.name, line.result.partition(b" ")[0].partition(b"<")[0]
        table = self._tables.setdefault(tid, {})
        if name in CLONES:
            self._born(tid, result, shares=b"CLONE_FILES" in line.args)
        elif name in CHANGES:
            _change(table, name, line.args, result)
            if len(table) > _MOST:
                table.clear()
            # Threads share their table, and what was named by it.
            for other, its in self._tables.items():
                if its is table:
                    self._named.pop(other, None)

    def same(self, tid: bytes, other: bytes) -> None:
        """Learn that two names are of one thread."""
        if tid in self._tables:
            self._tables[other] = self._tables[tid]

    def _born(self, parent: bytes, child: bytes, *, shares: bool) -> None:
        table = self._tables[parent]
        self._tables[child] = table if shares else {**table, **self._tables.get(child, {})}
        self._named.pop(child, None)


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
