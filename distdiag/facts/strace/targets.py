"""What a call is about: a file, a socket, a pipe, from its arguments."""

from __future__ import annotations

import os
import re

from distdiag.facts.strace import lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRST = re.compile(
    rb"(?:AT_FDCWD|-?\d+)?(?:(?P<what>" + lines.DECODED + rb")(?:\(deleted\))?)?"
    rb"(?:(?:, )?(?P<path>" + lines.STRING + rb"))?"
)
_POLLED = re.compile(rb"\[\{fd=(\d{1,7})(" + lines.DECODED + rb")?")
_AT = re.compile(rb"\w+at2?|statx")
_DATA_FIRST = (b"getrandom", b"add_key", b"request_key", b"sethostname", b"setdomainname", b"init_module")
"""Calls with data, not a path, as first string."""
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f"}
_PORT = re.compile(rb"sin6?_port=htons\((\d{1,5})\)")
_INET = re.compile(rb'(?:sin_addr=inet_addr\(|sin6_addr=|inet_pton\(AF_INET6, )"([^"]{1,100})"')
_UNIX = re.compile(rb"sun_path=@?(" + lines.STRING + rb")")
_KIND = re.compile(r"[A-Za-z][\w-]*")
_END = re.compile(rb"<((?:[A-Z][\w-]{0,20}|pipe):\[(?:[^\s,<>]|(?<=-)>){1,400})")
_PAIR = re.compile(r"([A-Z][\w-]*):\[([^>]+?)->([^,\]]+(?:\]:\d+)?)(?:,.*)?\]")


def about(name: bytes, args: bytes) -> tuple[int | None, str]:
    """Return the first descriptor among the arguments, and the call's subject; empty if unknown."""
    if name in (b"connect", b"bind", b"sendto") and b"->" not in args:
        address = _address(args)
        if address:
            return _fd(args), address
    polled = _POLLED.match(args)
    if polled:
        return int(polled[1]), _shown(polled[2] or b"")
    found = _FIRST.match(args)
    if found is None or name in _DATA_FIRST or args.startswith(b"<... resuming"):
        return None, ""
    fd, what = _fd(args) if found["what"] else None, _shown(found["what"] or b"")
    has_path = found["path"] and (fd is None or _AT.fullmatch(name))
    if not has_path:
        return fd, what
    path = unescape(found["path"][1:-1])
    if path.startswith("/") or not what.startswith("/"):
        return fd, path
    return fd, os.path.normpath(what + "/" + path)


def place(target: str) -> str:
    """Return the part of the file tree, two names deep, or the kind of socket; empty if unknown."""
    if target.startswith("/"):
        return "/".join(os.path.dirname(target).split("/")[:3]) or "/"
    if target.startswith("anon_inode:"):
        return target
    kind = _KIND.match(target)
    return kind[0] if kind and target[kind.end() : kind.end() + 2] == ":[" else ""


def ends(name: bytes, text: bytes) -> Iterator[str]:
    """List the sockets and pipes that a call mentions: "TCP:[A->B", "pipe:[9"; of connect() its address: "->B"."""
    for end in _END.findall(text):
        yield end.removesuffix(b"]").decode("utf-8", "replace")
    if name == b"connect":
        yield "->" + _address(text)


def pair(target: str) -> tuple[str, str, str] | None:
    """Return the kind, near and far address of a connection; None if `target` is none."""
    found = _PAIR.match(target)
    return (found[1], found[2], found[3]) if found else None


def unescape(raw: bytes) -> str:
    """Undo strace's escapes."""
    if b"\\" in raw:
        raw = _ESCAPE.sub(_unescaped, raw)
    return raw.decode("utf-8", "replace")


def _fd(args: bytes) -> int | None:
    digits = re.match(rb"\d+(?![\w.])", args)
    return int(digits[0]) if digits and len(digits[0]) < 8 else None


def _shown(decoded: bytes) -> str:
    """Return the path of "</dev/nvidia0<char 195:0>>" or "</tmp/x (deleted)>", and sockets unchanged."""
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


def _unescaped(match: re.Match[bytes]) -> bytes:
    what = match[1]
    return bytes([int(what, 8) & 255]) if b"0" <= what < b"8" else _ESCAPES.get(what, what)
