"""Why a host can only be reached by OpenSSH's own client: what is set for it is more than paramiko can do."""

from __future__ import annotations

import base64
import binascii
import functools
import os
import shutil
import stat
from typing import TYPE_CHECKING

from distdiag.node import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.cluster.transports.ssh_said import Said

_MUST_BE_UNSET = (
    "ProxyCommand",
    "CertificateFile",
    "PKCS11Provider",
    "KnownHostsCommand",
    "RevokedHostKeys",
    "BindInterface",
)
_MUST_BE_OFF = ("HostbasedAuthentication", "VerifyHostKeyDNS")
_SECURITY_KEYS = (b"sk-ssh-ed25519@openssh.com", b"sk-ecdsa-sha2-nistp256@openssh.com")
_PUBLIC_KEY = (b"ssh-", b"ecdsa-", b"sk-")
_MAX_KEY_BYTES = 65536
_KLIST_S = 2.0


def why_openssh(said: Said, keys: Sequence[str | None]) -> str:
    """Give the first reason, in words, and "" if paramiko will do; None stands for a key file whose name is unclear."""
    return next(_reasons(said, keys), "")


def is_private_key(path: str) -> bool:
    """Tell whether a file can be read and is not the public half of a key."""
    head = _read(path)
    return bool(head) and not head.startswith(_PUBLIC_KEY)


def _reasons(said: Said, keys: Sequence[str | None]) -> Iterator[str]:
    def value(option: str) -> str:
        return said.get(option.lower(), [""])[0].lower()

    def is_on(option: str) -> bool:
        return value(option) in ("yes", "true")

    yield from (f"{option} is set" for option in _MUST_BE_UNSET if value(option) not in ("", "none"))
    yield from (f"{option} is on" for option in _MUST_BE_OFF if is_on(option))
    if value("PubkeyAuthentication") in ("no", "false"):
        yield "PubkeyAuthentication is off"
    control = said.get("controlpath", ["none"])[0]
    if control != "none" and _is_socket(control):
        yield f"ControlPath {control} leads to a connection that is open already"
    for path in keys:
        yield from _of_key(path, identities_only=is_on("IdentitiesOnly"))
    # Debian and Red Hat switch it on for everybody; it does something only for those who have a ticket.
    if is_on("GSSAPIAuthentication") and _has_ticket(shutil.which("klist"), os.environ.get("KRB5CCNAME", "")):
        yield "GSSAPIAuthentication is on and there is a Kerberos ticket"


def _of_key(path: str | None, *, identities_only: bool) -> Iterator[str]:
    if path is None:
        yield "IdentityFile has a token that only ssh replaces"
        return
    if os.path.exists(f"{path}-cert.pub"):
        yield f"{path}-cert.pub is a certificate"
    key, public = _read(path), _read(f"{path}.pub")
    private = b"" if key.startswith(_PUBLIC_KEY) else _openssh_format(key)
    if public.startswith(b"sk-") or key.startswith(b"sk-") or any(type_ in private for type_ in _SECURITY_KEYS):
        yield f"{path} is on a security key"
    elif key.startswith(_PUBLIC_KEY):
        yield f"{path} is a public key: it says which key of the agent to take"
    elif identities_only and (_has_passphrase(key, private) or (public and not key)):
        yield f"IdentitiesOnly is on, and only the agent can use {path}"


def _openssh_format(key: bytes) -> bytes:
    """Give what is inside a private key in OpenSSH's own format; its public half is there in the clear."""
    lines = key.split(b"\n")
    if not lines[0].startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----"):
        return b""
    try:
        return base64.b64decode(b"".join(line for line in lines[1:] if not line.startswith(b"-----")))
    except binascii.Error:
        return b""


def _has_passphrase(key: bytes, private: bytes) -> bool:
    if private:
        return not private.startswith(b"openssh-key-v1\0\0\0\0\4none")
    return b"ENCRYPTED" in key  # both older formats say so in the clear


def _read(path: str) -> bytes:
    """Give what is in a key file; nothing if it cannot be read: ssh then passes it over as well."""
    try:
        if not os.path.isfile(path):
            return b""
        with open(path, "rb") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError:
        return b""


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


@functools.cache
def _has_ticket(klist: str | None, place: str) -> bool:
    """Tell whether there is a Kerberos ticket; without klist, only tickets in files can be ruled out."""
    if klist is not None:
        try:
            return run.run([klist, "-s"], timeout_s=_KLIST_S).status == 0
        except run.CannotRun:
            return False
    kind, colon, path = (place or f"/tmp/krb5cc_{os.getuid()}").rpartition("FILE:")
    return os.path.exists(path) if colon or path.startswith("/") else bool(kind or path)
