"""What a call is about: a file, a socket, a pipe; and which part of the machine that belongs to."""

from __future__ import annotations

import os
import re

from distdiag.node.strace import lines

_FIRST = re.compile(
    rb"(?:(?P<at>AT_FDCWD)|(?P<fd>-?\d+))?(?:(?P<what>" + lines.DECODED + rb")(?:\(deleted\))?)?"
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
"""The calls that are about a process, of which strace -Y shows the name as -y does what a descriptor stands for."""
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


def about(name: bytes, args: bytes) -> tuple[int | None, str]:
    """Give the descriptor that comes first among the arguments, and what the call is about; empty if not known."""
    if name in (b"connect", b"bind", b"sendto") and b"->" not in args:
        address = _address(args)
        if address:
            return _fd(args), address
    first = _POLLED.match(args)
    if first:
        return int(first[1]), _shown(first[2] or b"")
    found = _FIRST.match(args)
    if found is None:
        return None, ""
    if _OF_PROCESS.fullmatch(name) or name in _DATA_FIRST:
        return None, ""
    fd, what = _fd(args) if found["what"] or has_descriptor(name) else None, _shown(found["what"] or b"")
    has_path = found["path"] and (fd is None or _AT.fullmatch(name))
    if not has_path:
        return fd, what
    path = text(found["path"][1:-1])
    if path.startswith("/") or not what.startswith("/"):
        return fd, path
    return fd, os.path.normpath(what + "/" + path)


def without_payload(name: bytes, args: bytes) -> bytes:
    """Return arguments without what is read, written or sent, which may be secret: paths and addresses stay."""
    if name in _EXECUTES:
        return args.partition(b", [")[0]
    return args if _WITH_PATHS.fullmatch(name) else _STRINGS.sub(_emptied, args)


def _emptied(string: re.Match[bytes]) -> bytes:
    return string[0] if string["address"] or string[0].startswith(b'""') else b'""...'


def has_descriptor(name: bytes) -> bool:
    """Tell whether a number that comes first among the arguments is a descriptor."""
    return not _NUMBERED.fullmatch(name)


def place(target: str) -> str:
    """Tell which part of the file tree, two names deep, or which kind of socket; empty if not known."""
    if target.startswith("/"):
        return "/".join(os.path.dirname(target).split("/")[:3]) or "/"
    if target.startswith("anon_inode:"):
        return target
    kind = _CLASS.match(target)
    return kind[0] if kind and target[kind.end() : kind.end() + 2] == ":[" else ""


def text(raw: bytes) -> str:
    """Undo strace's escapes."""
    if b"\\" in raw:
        raw = _ESCAPE.sub(_unescape, raw)
    return raw.decode("utf-8", "replace")


def _unescape(match: re.Match[bytes]) -> bytes:
    what = match[1]
    return bytes([int(what, 8) & 255]) if b"0" <= what < b"8" else _ESCAPES.get(what, what)


def _fd(args: bytes) -> int | None:
    digits = re.match(rb"\d+(?![\w.])", args)
    return int(digits[0]) if digits and len(digits[0]) < 8 else None


def _shown(decoded: bytes) -> str:
    """Leave the path of "</dev/nvidia0<char 195:0>>" or "</tmp/x (deleted)>", and sockets as they are."""
    inner = decoded[1:-1]
    if inner.startswith(b"/"):
        inner = re.sub(rb"<(?:char|block) [\d:]+>$|<(?:char|block) [\d:]+$", b"", inner)
        inner = inner[:-10] if inner.endswith(b" (deleted)") else inner
    return text(inner)


def _address(args: bytes) -> str:
    port = _PORT.search(args)
    inet = _INET.search(args, port.end()) if port else None
    if port and inet:
        host = inet[1].decode("utf-8", "replace")
        return f"[{host}]:{int(port[1])}" if ":" in host else f"{host}:{int(port[1])}"
    path = _UNIX.search(args)
    return text(path[1][1:-1]) if path else ""
