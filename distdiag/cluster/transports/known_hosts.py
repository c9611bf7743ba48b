"""Known host keys, by plain and hashed names; other kinds of known_hosts lines are left to OpenSSH."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hashlib
import hmac
import os
import re
import stat
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_FILE_BYTES = 64 * 2**20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:%-]+")
_MAX_PATTERN_BYTES = 1024  # ssh's own limit


class KeyVerdict(StrEnum):
    """What the files contain about a key that a host showed. Only KNOWN is trust.

    OTHER_TYPE: the host is known by keys of other types only, which OpenSSH asks it for.
    """

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    OTHER_TYPE = "other-type"


@record(slots=True)
class Verdict:
    """A verdict and the line that it rests on; UNKNOWN rests on none."""

    key: KeyVerdict
    file: str = ""
    line: int = 0


@record(slots=True)
class _Line:
    """A key and its hosts: one hashed name, or names in lower case."""

    file: str
    number: int
    names: bytes
    blob: bytes

    def has_hash_of(self, name: bytes) -> bool:
        """Return whether the hashed name is this one, given in lower case, as [name]:port if the port is not 22."""
        salt, digest = map(_decode, self.names.split(b"|")[2:])
        return hmac.compare_digest(hmac.digest(salt, name, "sha1"), digest)


class KnownHosts:
    """The lines of known_hosts files that ssh could use."""

    def __init__(self) -> None:
        self._plain: dict[bytes, list[_Line]] = {}
        self._hashed: dict[bytes, list[_Line]] = {}
        """By key."""
        self._others: list[re.Pattern[bytes]] = []

    @classmethod
    def read(cls, paths: Iterable[str]) -> KnownHosts:
        """Read those of the files that exist."""
        known = cls()
        for path in paths:
            for number, text in enumerate(_contents(path).split(b"\n"), 1):
                known._add(path, number, text)
        return known

    def needs_openssh(self, name: str, port: int) -> bool:
        """Return whether a wildcard, @revoked or @cert-authority line may be about this host, or its name is odd."""
        by_pattern = (pattern.fullmatch(alias) for pattern in self._others for alias in _names(name, port))
        return not _PLAIN_NAME.fullmatch(name) or any(by_pattern)

    def types(self, name: str, port: int) -> set[str]:
        """Return the types of the keys known for this host by its plain name."""
        lines = (line for alias in _names(name, port) for line in self._plain.get(alias, ()))
        return {_type_in(line.blob).decode() for line in lines}

    def check(self, name: str, port: int, blob: bytes) -> Verdict:
        """Judge the key that a host showed."""
        names = _names(name, port)
        verdict = self._judge(names[0], blob)
        if verdict.key is not KeyVerdict.UNKNOWN or len(names) == 1:
            return verdict
        # Nothing under [name]:port: like ssh, trust the key if it is known for the name alone, and only then.
        without_port = self._judge(names[1], blob)
        return without_port if without_port.key is KeyVerdict.KNOWN else verdict

    def _judge(self, name: bytes, blob: bytes) -> Verdict:
        plain = self._plain.get(name, [])
        for line in (*plain, *self._hashed.get(blob, ())):
            if line.blob == blob and (line in plain or line.has_hash_of(name)):
                return Verdict(KeyVerdict.KNOWN, line.file, line.number)
        # Tries every hashed line, where a known key mostly needs one.
        hashed = (line for lines in self._hashed.values() for line in lines)
        others = [*plain, *(line for line in hashed if line.has_hash_of(name))]
        for line in others:
            if _type_in(line.blob) == _type_in(blob):
                return Verdict(KeyVerdict.CHANGED, line.file, line.number)
        return (
            Verdict(KeyVerdict.OTHER_TYPE, others[0].file, others[0].number) if others else Verdict(KeyVerdict.UNKNOWN)
        )

    def _add(self, file: str, number: int, text: bytes) -> None:
        """Add a line, unless ssh would skip it."""
        # ssh, being written in C, does not see what follows a NUL.
        fields = text.partition(b"\0")[0].rstrip(b"\r").replace(b"\t", b" ").split(b" ")
        fields = [field for field in fields if field]
        marker = fields.pop(0) if fields and fields[0].startswith(b"@") else b""
        if len(fields) < 3 or fields[0].startswith(b"#"):
            return
        names, key_type, key = fields[:3]
        blob = _decode(key)
        if not blob or _type_in(blob) != key_type or (names.startswith(b"|") and not _is_hashed(names)):
            return
        if marker or (re.search(rb"[*?!]", names) and not names.startswith(b"|")):
            self._others += map(_pattern, names.lower().split(b","))
        elif names.startswith(b"|"):
            self._hashed.setdefault(blob, []).append(_Line(file, number, names, blob))
        else:
            line = _Line(file, number, names.lower(), blob)
            for name in dict.fromkeys(line.names.split(b",")):
                self._plain.setdefault(name, []).append(line)


def _pattern(text: bytes) -> re.Pattern[bytes]:
    """Compile one name of such a line: * and ? as in ssh; a hashed name matches any host, !name none."""
    if text.startswith(b"|"):
        text = b"*"
    if text.startswith(b"!") or len(text) >= _MAX_PATTERN_BYTES:
        return re.compile(rb"(?!)")
    return re.compile(fnmatch.translate(text.replace(b"[", b"[[]").decode("latin-1")).encode("latin-1"))


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def line(name: str, port: int, blob: bytes) -> str:
    """Return the known_hosts line that makes this key known for this host; not for names that `needs_openssh`."""
    return b" ".join((_names(name, port)[0], _type_in(blob), base64.b64encode(blob))).decode()


def own_file() -> str:
    """Return the file of keys accepted with --accept-new; ssh's own files are never written."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the specification has relative ones ignored
        base = os.path.expanduser("~/.config")
    return os.path.join(base, "distdiag", "known_hosts")


def make_own_file() -> None:
    """Make our file, unless it exists, for OpenSSH's client to add keys to; for the user only. Raises OSError."""
    path = own_file()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _names(name: str, port: int) -> tuple[bytes, ...]:
    """Return the names to look up, most important first."""
    plain = name.encode("utf-8", "surrogateescape").lower()
    return (plain,) if port == 22 else (b"[%s]:%d" % (plain, port), plain)


def _type_in(blob: bytes) -> bytes:
    """Return the key type at the start of ssh's binary form; empty if malformed."""
    length = int.from_bytes(blob[:4], "big")
    type_ = blob[4 : 4 + length]
    return type_ if 0 < length == len(type_) and type_.isascii() else b""


def _is_hashed(name: bytes) -> bool:
    """Return whether a name is of the form |1|salt|HMAC-SHA1."""
    parts = name.split(b"|")
    return len(parts) == 4 and parts[1] == b"1" and all(len(_decode(part)) == 20 for part in parts[2:])


def _decode(text: bytes) -> bytes:
    """Decode base64; empty if invalid."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


def _contents(path: str) -> bytes:
    """Read a file; empty if unreadable, as in ssh."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO must not block
        with open(descriptor, "rb") as file:
            return file.read(_MAX_FILE_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    return b""
