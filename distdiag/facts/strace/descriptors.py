"""What a call is about: a file, a socket, a pipe; from its arguments, and without -y from the calls that opened it."""

from __future__ import annotations

import os
import re

from distdiag.facts.strace import lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.facts.strace.lines import Line

_FIRST = re.compile(
    rb"(?:AT_FDCWD|-?\d+)?(?:(?P<what>" + lines.DECODED + rb")(?:\(deleted\))?)?"
    rb"(?:(?:, )?(?P<path>" + lines.STRING + rb"))?"
)
_POLLED = re.compile(rb"\[\{fd=(\d{1,7})(" + lines.DECODED + rb")?")
_AT = re.compile(rb"\w+at2?|statx")
_NUMBERED = re.compile(
    rb"exit\w*|\w*kill|wait\w*|alarm|umask|\w*set\w*[ug]id\w*|setpgid|getpgid|getsid|\w*sched\w*|\w*priority|\w*rlimit\w*"
    rb"|membarrier|socket|socketpair|epoll_create1?|eventfd2?|memfd_secret|\w*_dumpable|nice|personality|ptrace|kcmp"
    rb"|process_\w+|rt_\w+|signalfd|pipe2?|inotify_init1?|userfaultfd|landlock_\w+|io_\w+|timer_\w+|move_pages|iopl"
)
"""The calls whose first number is no descriptor, though strace shows it plainly."""
_OF_PROCESS = re.compile(
    rb"\w*kill|wait\w*|[gs]etp?[gs]id|\w*sched\w*|\w*priority|\w*rlimit\w*|kcmp|process_\w+|move_pages|pidfd_open"
)
"""The calls that are about a process, of which strace -Y shows the name, as -y shows the target of a descriptor."""
_DATA_FIRST = (b"getrandom", b"add_key", b"request_key", b"sethostname", b"setdomainname", b"init_module")
"""The calls whose first string is no path but data."""
_STRINGS = re.compile(
    rb"(?P<address>(?:inet_addr\(|inet_pton\(AF_INET6, |sun_path=@?)" + lines.STRING + rb")"
    rb'|"(?:[^"\\]|\\.)*(?:"(?:\.\.\.)?|$)',
    re.DOTALL,
)
_WITH_PATHS = re.compile(
    rb".*(?:open|stat|access|link|mkdir|rmdir|rename|chdir|chroot|chmod|chown|mknod|creat|utime).*|truncate|getcwd|umount2?"
)
_EXECUTES = (b"execve", b"execveat")
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f"}
_PORT = re.compile(rb"sin6?_port=htons\((\d{1,5})\)")
_INET = re.compile(rb'(?:sin_addr=inet_addr\(|sin6_addr=|inet_pton\(AF_INET6, )"([^"]{1,100})"')
_UNIX = re.compile(rb"sun_path=@?(" + lines.STRING + rb")")
_CLASS = re.compile(r"[A-Za-z][\w-]*")

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
_CHANGES = frozenset({*_OPENS, *_MAKES, *_PAIRS, *_COPIES, b"socket", b"connect", b"close"})
_CLONES = (b"clone", b"clone3", b"fork", b"vfork")
_MAX_OPEN = 8192
"""Of the descriptors of a process that were never seen closed: more are forgotten."""
_MAX_COPIED = 4 * _MAX_OPEN
"""Of all processes, most of which ended long ago."""


def about(name: bytes, args: bytes) -> tuple[int | None, str]:
    """Return the descriptor that comes first among the arguments, and what the call is about; empty if not known."""
    if name in (b"connect", b"bind", b"sendto") and b"->" not in args:
        address = _address(args)
        if address:
            return _fd(args), address
    polled = _POLLED.match(args)
    if polled:
        return int(polled[1]), _shown(polled[2] or b"")
    found = _FIRST.match(args)
    if found is None or _OF_PROCESS.fullmatch(name) or name in _DATA_FIRST:
        return None, ""
    fd, what = _fd(args) if found["what"] or _has_descriptor(name) else None, _shown(found["what"] or b"")
    has_path = found["path"] and (fd is None or _AT.fullmatch(name))
    if not has_path:
        return fd, what
    path = unescape(found["path"][1:-1])
    if path.startswith("/") or not what.startswith("/"):
        return fd, path
    return fd, os.path.normpath(what + "/" + path)


def without_payload(name: bytes, args: bytes) -> bytes:
    """Return arguments without what is read, written or sent, which may be secret: paths and addresses stay."""
    if name in _EXECUTES:
        return args.partition(b", [")[0]
    return args if _WITH_PATHS.fullmatch(name) else _STRINGS.sub(_emptied, args)


def place(target: str) -> str:
    """Return which part of the file tree, two names deep, or which kind of socket; empty if not known."""
    if target.startswith("/"):
        return "/".join(os.path.dirname(target).split("/")[:3]) or "/"
    if target.startswith("anon_inode:"):
        return target
    kind = _CLASS.match(target)
    return kind[0] if kind and target[kind.end() : kind.end() + 2] == ":[" else ""


def unescape(raw: bytes) -> str:
    """Undo strace's escapes."""
    if b"\\" in raw:
        raw = _ESCAPE.sub(_unescaped, raw)
    return raw.decode("utf-8", "replace")


class Descriptors:
    """The descriptors of each process, which its threads share, as far as a log without -y shows them."""

    def __init__(self) -> None:
        self._tables: dict[bytes, dict[bytes, bytes]] = {}
        self._copied = 0

    def decode(self, tid: bytes, name: bytes, args: bytes) -> bytes:
        """Return the arguments of a call as -y would have written them."""
        table, fd = self._tables.get(tid), _NUMBER.match(args)
        if not table or not fd or args[fd.end() : fd.end() + 1] not in (b"", b","):
            return args
        what = table.get(fd[0])
        return args if what is None or not _has_descriptor(name) else fd[0] + b"<" + what + b">" + args[fd.end() :]

    def follow(self, tid: bytes, line: Line) -> None:
        """Learn from a call that ended which descriptors it opened, copied or closed."""
        if line.error or not line.result or not (line.name in _CHANGES or line.name in _CLONES):
            return
        result = line.result.partition(b" ")[0].partition(b"<")[0]
        table = self._tables.setdefault(tid, {})
        if line.name in _CLONES:
            self._start(table, result, shares=b"CLONE_FILES" in line.args)
            return
        _change(table, line.name, line.args, result)
        if len(table) > _MAX_OPEN:
            table.clear()

    def rename(self, tid: bytes, new: bytes) -> None:
        """Learn that two ids are of one thread."""
        if tid in self._tables:
            self._tables[new] = self._tables[tid]

    def _start(self, parent: dict[bytes, bytes], child: bytes, *, shares: bool) -> None:
        if shares:
            self._tables[child] = parent
            return
        self._copied += len(parent)
        if self._copied > _MAX_COPIED:
            self._copied = 0
            self._tables = {tid: table for tid, table in self._tables.items() if table is parent}
        self._tables[child] = {**parent, **self._tables.get(child, {})}


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
    elif name == b"connect" and fds:
        kind = table.get(fds[0], b"socket:").partition(b":")[0]
        table[fds[0]] = kind + b":[->" + about(name, args)[1].encode() + b"]"


def _socket(args: bytes) -> bytes:
    family = args.partition(b",")[0].partition(b"_")[2]
    if family in (b"INET", b"INET6"):
        return (b"TCP" if b"SOCK_STREAM" in args else b"UDP") + (b"v6:[]" if family == b"INET6" else b":[]")
    return family + b":[]"


def _has_descriptor(name: bytes) -> bool:
    """Return whether a number that comes first among the arguments is a descriptor."""
    return not _NUMBERED.fullmatch(name)


def _fd(args: bytes) -> int | None:
    digits = re.match(rb"\d+(?![\w.])", args)
    return int(digits[0]) if digits and len(digits[0]) < 8 else None


def _shown(decoded: bytes) -> str:
    """Return the path of "</dev/nvidia0<char 195:0>>" or "</tmp/x (deleted)>", and sockets as they are."""
    inner = decoded[1:-1]
    if inner.startswith(b"/"):
        inner = re.sub(rb"<(?:char|block) [\d:]+>$|<(?:char|block) [\d:]+$", b"", inner)
        inner = inner[:-10] if inner.endswith(b" (deleted)") else inner
    return unescape(inner)


def _address(args: bytes) -> str:
    port = _PORT.search(args)
    inet = _INET.search(args, port.end()) if port else None
    if port and inet:
        host = inet[1].decode("utf-8", "replace")
        return f"[{host}]:{int(port[1])}" if ":" in host else f"{host}:{int(port[1])}"
    path = _UNIX.search(args)
    return unescape(path[1][1:-1]) if path else ""


def _emptied(string: re.Match[bytes]) -> bytes:
    return string[0] if string["address"] or string[0].startswith(b'""') else b'""...'


def _unescaped(match: re.Match[bytes]) -> bytes:
    what = match[1]
    return bytes([int(what, 8) & 255]) if b"0" <= what < b"8" else _ESCAPES.get(what, what)
