"""Host keys that are known: reads known_hosts as ssh does, and keeps the keys that distdiag itself was told to accept.

Where a host is known only by keys of other types, OpenSSH 9.2 refuses its key as changed, under accept-new as well.
`KeyVerdict.OTHER_TYPE` tells that case apart, because asking the server for a known type may mend it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import stat
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

REVOKED = "@revoked"
CERTIFICATE_AUTHORITY = "@cert-authority"
_MARKERS = {b"": "", REVOKED.encode(): REVOKED, CERTIFICATE_AUTHORITY.encode(): CERTIFICATE_AUTHORITY}
_MAX_PATTERN_BYTES = 1024  # ssh's own limit


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
        self._keyed = hmac.new(salt, digestmod="sha1")

    def matches(self, name: bytes) -> bool:
        """Return whether this is that name's hash."""
        hashed = self._keyed.copy()
        hashed.update(name)
        return hashed.digest() == self._digest


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
        """Return whether it is for this name, given in lower case, as [name]:port if the port is not 22."""
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
        raise ValueError("the name, the key type or the key is missing")
    names, key_type, key = fields[:3]
    if key_type.isdigit():
        raise ValueError("the key is of the SSH 1 protocol, which is no longer used")
    blob = _decode(key, "the key")
    if type_in(blob) != key_type:
        raise ValueError("the key is not of the type in the line")
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


_MAX_FILE_BYTES = 64 * 2**20
_MAX_COMPLAINTS = 100
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:%-]+")


class KeyVerdict(StrEnum):
    """What the files say of a key that a host showed. Only KNOWN is trust; accept-new may add UNKNOWN and no other."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    OTHER_TYPE = "other-type"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict and the line that it rests on; UNKNOWN rests on none."""

    key: KeyVerdict
    file: str = ""
    line: int = 0


class KnownHosts:
    """The lines of known_hosts files; `complaints` says what could not be used, as file:line and why."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._plain: dict[bytes, list[Line]] = {}
        self._tried: list[Line] = []  # patterns and hashed names: nothing but trying tells whom they are for
        self._tried_by_key: dict[bytes, list[Line]] = {}
        self._revoked_by_key: dict[bytes, list[Line]] = {}
        self._authorities: list[Line] = []
        self._found: dict[bytes, tuple[Line, ...]] = {}

    @classmethod
    def read(cls, paths: Iterable[str]) -> KnownHosts:
        """Read those of the files that exist."""
        known = cls()
        for path in paths:
            data, complaint = _contents(path)
            if complaint:
                known._complain(f"{path}: {complaint}")
            for number, text in enumerate(data.split(b"\n"), 1):
                known._add(path, number, text)
        return known

    def check(self, name: str, port: int, key_type: str, key_blob: bytes) -> Verdict:
        """Judge the key that a host showed. Its type is the one inside the key: ssh-rsa, never rsa-sha2-512."""
        if type_in(key_blob) != key_type.encode():
            raise ValueError(f"this key is not of the type {key_type}")
        names = _names(name, port)
        for line in self._revoked_by_key.get(key_blob, ()):
            if any(line.matches(alias) for alias in names):
                return Verdict(KeyVerdict.REVOKED, line.file, line.number)
        verdict = self._judge(names[0], key_type, key_blob)
        if verdict.key is not KeyVerdict.UNKNOWN or len(names) == 1:
            return verdict
        # Nothing under [name]:port: like ssh, trust the key if it is known for the name alone, and only then.
        without_port = self._judge(names[1], key_type, key_blob)
        return without_port if without_port.key is KeyVerdict.KNOWN else verdict

    def known_types(self, name: str, port: int) -> list[str]:
        """List the key types known for this host. Tries every hashed line, where `check` mostly needs one."""
        for alias in _names(name, port):
            if types := dict.fromkeys(line.key_type for line in self._lines(alias)):
                return list(types)
        return []

    def has_certificate_authority(self, name: str, port: int) -> bool:
        """Return whether this host may show a certificate instead of a known key."""
        return any(line.matches(alias) for line in self._authorities for alias in _names(name, port))

    def _judge(self, name: bytes, key_type: str, blob: bytes) -> Verdict:
        line = next(self._lines_with(name, blob), None)
        if line is not None:
            return Verdict(KeyVerdict.KNOWN, line.file, line.number)
        others = self._lines(name)
        for line in others:
            if line.key_type == key_type:
                return Verdict(KeyVerdict.CHANGED, line.file, line.number)
        if others:
            return Verdict(KeyVerdict.OTHER_TYPE, others[0].file, others[0].number)
        return Verdict(KeyVerdict.UNKNOWN)

    def _lines_with(self, name: bytes, blob: bytes) -> Iterator[Line]:
        yield from (line for line in self._plain.get(name, ()) if line.blob == blob)
        yield from (line for line in self._tried_by_key.get(blob, ()) if line.matches(name))

    def _lines(self, name: bytes) -> tuple[Line, ...]:
        if name not in self._found:
            tried = (line for line in self._tried if line.matches(name))
            self._found[name] = (*self._plain.get(name, ()), *tried)
        return self._found[name]

    def _add(self, file: str, number: int, text: bytes) -> None:
        try:
            line = parse(file, number, text)
        except ValueError as error:
            self._complain(f"{file}:{number}: {error}")
            return
        if line is None:
            return
        if line.marker == CERTIFICATE_AUTHORITY:
            self._authorities.append(line)
        elif line.marker == REVOKED:
            self._revoked_by_key.setdefault(line.blob, []).append(line)
        elif line.plain:
            for name in dict.fromkeys(line.names):
                self._plain.setdefault(name, []).append(line)
        else:
            self._tried.append(line)
            self._tried_by_key.setdefault(line.blob, []).append(line)

    def _complain(self, what: str) -> None:
        if len(self.complaints) < _MAX_COMPLAINTS:
            self.complaints.append(what)


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def line(name: str, port: int, key_type: str, blob: bytes) -> str:
    """Return the known_hosts line that makes this key known for this host.

    Raises:
        DistdiagError: in a known_hosts file the name would mean something else.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise DistdiagError(f"cannot store the key of {name!r}: the name has a special meaning in known_hosts")
    return f"{_names(name, port)[0].decode()} {key_type} {base64.b64encode(blob).decode()}"


def own_file() -> str:
    """Return the file of keys accepted with --accept-new; ssh's own files are never written."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the specification has relative ones ignored
        base = os.path.expanduser("~/.config")
    return os.path.join(base, "distdiag", "known_hosts")


def append(path: str, line: str) -> None:
    """Add a line to a file of ours, unless it is there; both file and folder are for the user only.

    Raises:
        DistdiagError: the file cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+b", buffering=0) as file:
            with contextlib.suppress(OSError):  # without locks (some NFS) two runs at once may add a line twice
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            there = file.read()
            if line.encode() not in there.split(b"\n"):
                # In one write, so that no reader sees half a line.
                file.write((b"\n" if there and not there.endswith(b"\n") else b"") + line.encode() + b"\n")
    except OSError as error:
        raise DistdiagError(
            f"cannot write {path}: {error.strerror}",
            hint="set XDG_CONFIG_HOME to a writable folder, or add the key to ~/.ssh/known_hosts",
        ) from error


def _names(name: str, port: int) -> tuple[bytes, ...]:
    """Return the names to look up, most important first."""
    plain = name.encode("utf-8", "surrogateescape").lower()
    return (plain,) if port == 22 else (b"[%s]:%d" % (plain, port), plain)


def _contents(path: str) -> tuple[bytes, str]:
    """Read a file; return its contents and why they are incomplete."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us up
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b"", "" if path == os.devnull else "not a regular file"
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(_MAX_FILE_BYTES)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return b"", ""
    except (OSError, ValueError) as error:
        return b"", f"cannot be read: {error}"
    return data, "" if len(data) < _MAX_FILE_BYTES else f"only its first {_MAX_FILE_BYTES >> 20} MiB are read"
