"""One line of a known_hosts file: what it says, and which names it is for (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT)."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass

REVOKED = "@revoked"
CERTIFICATE_AUTHORITY = "@cert-authority"
_MARKERS = {b"": "", REVOKED.encode(): REVOKED, CERTIFICATE_AUTHORITY.encode(): CERTIFICATE_AUTHORITY}
_MAX_PATTERN_BYTES = 1024  # ssh's own limit
_INNER_PAD = bytes(number ^ 0x36 for number in range(256))
_OUTER_PAD = bytes(number ^ 0x5C for number in range(256))


class HashedName:
    """A name of which only an HMAC-SHA1 is told."""

    def __init__(self, text: bytes) -> None:
        """Take `|1|salt|hash`; ValueError if it is not that."""
        _, kind, *parts = text.split(b"|")
        if kind != b"1" or len(parts) != 2:
            raise ValueError("the hashed name is not of the form |1|salt|hash")
        salt, self._digest = (_decode(part, "the hashed name") for part in parts)
        if len(salt) != 20 or len(self._digest) != 20:
            raise ValueError("the hashed name has not the length of a SHA-1")
        # What HMAC begins with is the same for every name that is tried: three times faster than anew each time.
        block = salt.ljust(64, b"\0")
        self._inner = hashlib.sha1(block.translate(_INNER_PAD), usedforsecurity=False)
        self._outer = hashlib.sha1(block.translate(_OUTER_PAD), usedforsecurity=False)

    def matches(self, name: bytes) -> bool:
        """Tell whether this is that name's hash."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(name)
        outer.update(inner.digest())
        return outer.digest() == self._digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A key and whom it is for: a hashed name or else a list of patterns; `plain` where they are mere names."""

    file: str
    number: int
    marker: str
    names: tuple[bytes, ...]
    plain: bool
    hashed: HashedName | None
    key_type: str
    blob: bytes

    def matches(self, name: bytes) -> bool:
        """Tell whether it is for this name, given in lower case, as [name]:port if the port is not 22."""
        if self.hashed is not None:
            return self.hashed.matches(name)
        matched = False
        for pattern in self.names:
            if pattern.startswith(b"!"):
                if _fits(name, pattern[1:]):
                    return False
            elif not matched:
                matched = _fits(name, pattern)
        return matched


def parse(file: str, number: int, text: bytes) -> Line | None:
    """Read a line; None if it is empty or a comment.

    Raises:
        ValueError: it says nothing that ssh could use, and why.
    """
    # ssh, being written in C, does not see what follows a NUL.
    fields = text.partition(b"\0")[0].rstrip(b"\r").replace(b"\t", b" ").split(b" ")
    fields = [field for field in fields if field]
    if not fields or fields[0].startswith(b"#"):
        return None
    marker = _MARKERS.get(fields.pop(0) if fields[0].startswith(b"@") else b"")
    if marker is None:
        raise ValueError("the marker is neither @revoked nor @cert-authority")
    if len(fields) < 3:
        raise ValueError("a name, a key type and a key are not all there")
    names, key_type, key = fields[:3]
    if key_type.isdigit():
        raise ValueError("the key is of the SSH 1 protocol, which is no longer used")
    blob = _decode(key, "the key")
    if type_in(blob) != key_type:
        raise ValueError("the key is not of the type that the line gives")
    is_hashed = names.startswith(b"|")
    return Line(
        file=file,
        number=number,
        marker=marker,
        names=() if is_hashed else tuple(names.lower().split(b",")),
        plain=not is_hashed and not any(mark in names for mark in (b"*", b"?", b"!")),
        hashed=HashedName(names) if is_hashed else None,
        key_type=key_type.decode(),
        blob=blob,
    )


def type_in(blob: bytes) -> bytes:
    """Read the type that a key in ssh's binary form begins with; empty if there is none."""
    length = int.from_bytes(blob[:4], "big")
    type_ = blob[4 : 4 + length]
    return type_ if 0 < length == len(type_) and type_.isascii() else b""


def _decode(text: bytes, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{what} is not base64") from error


def _fits(name: bytes, pattern: bytes) -> bool:
    """Match with * and ?; going back only to the last *, so that no pattern takes long."""
    if len(pattern) >= _MAX_PATTERN_BYTES or len(pattern.replace(b"*", b"")) > len(name):
        return False
    at, star, resume = 0, -1, 0  # in the pattern; its last * so far; where in the name that * ended
    here = 0
    while here < len(name):
        if at < len(pattern) and pattern[at] == ord("*"):
            star, resume = at, here
            at += 1
        elif at < len(pattern) and pattern[at] in (ord("?"), name[here]):
            at, here = at + 1, here + 1
        elif star >= 0:
            resume += 1
            at, here = star + 1, resume
        else:
            return False
    return not pattern[at:].strip(b"*")
