"""What ssh itself would do for a host, as far as a client in this process can do the same."""

from __future__ import annotations

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from distdiag.cluster.transports import ssh_needs, ssh_said
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.cluster.hosts import Host
    from distdiag.cluster.transports.ssh_said import Said

_AT_ONCE = 8
_TIMEOUT_S = 10.0
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Names that ssh takes as they are but for their case; it rewrites other spellings of an address (127.1, 0:0::1).
_PLAIN_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9._-]*|{_BYTE}(?:\.{_BYTE}){{3}}")
_TOKEN = re.compile(r"%(.?)|\$\{([^}]*)\}")
_STRICT = {"true": "yes", "false": "no", "off": "no"}


@dataclass(frozen=True, kw_only=True)
class SshSettings:
    """How to reach `host`, the name as it was asked for.

    `identity_files` are the private keys that exist. `proxy_jump` are `[user@]host[:port]`, the first to connect to
    first; each may have settings of its own. `identity_agent` is a socket, "none", or None for SSH_AUTH_SOCK.
    `needs_openssh` says in words why only OpenSSH's own client can do it, and is empty where paramiko can.
    """

    host: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    identities_only: bool
    identity_agent: str | None
    proxy_jump: tuple[str, ...]
    proxy_command: str | None
    host_key_alias: str | None
    user_known_hosts: tuple[str, ...]
    global_known_hosts: tuple[str, ...]
    strict_host_key_checking: str
    connect_timeout_s: float | None
    bind_address: str | None
    address_family: Literal["any", "inet", "inet6"]
    needs_openssh: str

    @property
    def known_as(self) -> tuple[str, int]:
        """Name and port under which known_hosts has the key: an alias stands there without a port."""
        return (self.host_key_alias, 22) if self.host_key_alias else (self.hostname, self.port)


def resolve(host: Host, *, config_file: str | None = None, timeout_s: float = _TIMEOUT_S) -> SshSettings:
    """Find out what ssh would do for a host; `config_file` is what `ssh -F` would be given.

    Raises:
        DistdiagError: ssh would refuse, or took longer than `timeout_s` seconds.
    """
    return _settings(host, ssh_said.reader(config_file, timeout_s)(host))


def resolve_all(
    hosts: Sequence[Host], *, config_file: str | None = None, timeout_s: float = _TIMEOUT_S
) -> list[SshSettings | DistdiagError]:
    """Do `resolve` for many hosts: for each, in order, its settings or what would have been raised.

    Ssh is asked once, where its configuration has nothing that could depend on the host, and else for each host.
    """
    try:
        read = ssh_said.reader(config_file, timeout_s)
    except DistdiagError as error:
        return [error] * len(hosts)
    plain = [host for host in hosts if _is_plain(host)]
    template = None
    if len(plain) > 1 and not ssh_said.depends_on_host(config_file):
        template = _try(read, replace(plain[0], user=None, port=None, address=None))
    asked = [host for host in hosts if template is None or not _is_plain(host)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda host: _try(read, host), asked)
    return [next(answers) if template is None or not _is_plain(host) else _fill(template, host) for host in hosts]


def _try(read: Callable[[Host], Said], host: Host) -> SshSettings | DistdiagError:
    try:
        return _settings(host, read(host))
    except DistdiagError as error:
        return error


def _is_plain(host: Host) -> bool:
    return all(_PLAIN_NAME.fullmatch(name) for name in (host.name, host.address) if name)


def _fill(template: SshSettings | DistdiagError, host: Host) -> SshSettings | DistdiagError:
    if isinstance(template, DistdiagError):
        return template
    return replace(
        template,
        host=host.name,
        hostname=(host.address or host.name).lower(),
        user=host.user or template.user,
        port=host.port or template.port,
    )


def _settings(host: Host, said: Said) -> SshSettings:
    def value(option: str) -> str | None:
        text = said.get(option, ["none"])[0]
        return None if text.lower() == "none" else text

    keys = _keys(host, said)
    jump = value("proxyjump")
    timeout, strict = value("connecttimeout") or "", (value("stricthostkeychecking") or "ask").lower()
    return SshSettings(
        host=host.name,
        hostname=said["hostname"][0],
        port=int(said["port"][0]),
        user=said["user"][0],
        identity_files=tuple(key for key in keys if key is not None and ssh_needs.is_private_key(key)),
        identities_only=value("identitiesonly") in ("yes", "true"),
        identity_agent=_agent(said),
        proxy_jump=tuple(_jump(one) for one in jump.split(",")) if jump else (),
        proxy_command=value("proxycommand"),
        host_key_alias=value("hostkeyalias"),
        user_known_hosts=_paths(said.get("userknownhostsfile", [""])[0]),
        global_known_hosts=_paths(said.get("globalknownhostsfile", [""])[0]),
        strict_host_key_checking=_STRICT.get(strict, strict),
        connect_timeout_s=(float(timeout) or None) if timeout.isdigit() else None,
        bind_address=value("bindaddress"),
        address_family=_family(value("addressfamily")),
        needs_openssh=ssh_needs.why_openssh(said, keys),
    )


def _keys(host: Host, said: Said) -> list[str | None]:
    """Give the key files; `ssh -G` leaves their tokens as they are. None stands for a token only ssh can replace."""
    name, user = socket.gethostname(), ssh_said.user_name()
    tokens = {
        "%": "%",
        "d": ssh_said.home(),
        "h": said["hostname"][0],
        "i": str(os.getuid()),
        "k": said.get("hostkeyalias", [host.name])[0],
        "L": name.partition(".")[0],
        "l": name,
        "n": host.name,
        "p": said["port"][0],
        "r": said["user"][0],
        "u": user,
    }
    return [_expand(text, tokens) for text in said.get("identityfile", []) if text.lower() != "none"]


def _expand(text: str, tokens: dict[str, str]) -> str | None:
    values = [
        os.environ.get(found[2]) if found[2] is not None else tokens.get(found[1]) for found in _TOKEN.finditer(text)
    ]
    if None in values:
        return None
    given = iter(values)
    expanded = _TOKEN.sub(lambda _: next(given) or "", text)
    if not text.startswith("~"):
        return expanded
    owner, slash, rest = expanded[1:].partition("/")
    return (os.path.expanduser(f"~{owner}") if owner else ssh_said.home()) + slash + rest  # ssh's "~" is not $HOME


def _agent(said: Said) -> str | None:
    text = said.get("identityagent", ["SSH_AUTH_SOCK"])[0]
    if text.startswith("$"):
        return os.environ.get(text[1:], "none")
    return None if text == "SSH_AUTH_SOCK" else text


def _jump(text: str) -> str:
    """Drop what `ssh -G` adds or leaves: ssh://, and brackets around what is no IPv6 address."""
    return re.sub(r"\[([^\]:]*)\]", r"\1", text.removeprefix("ssh://").rstrip("/"))


def _paths(text: str) -> tuple[str, ...]:
    paths: list[str] = []
    for piece in text.split(" "):
        if paths and not piece.startswith("/") and not os.path.exists(paths[-1]):
            paths[-1] += f" {piece}"  # a path with a space, which `ssh -G` does not put in quotes
        else:
            paths.append(piece)
    return () if paths[0].lower() in ("", "none") else tuple(paths)


def _family(text: str | None) -> Literal["any", "inet", "inet6"]:
    return "inet" if text == "inet" else "inet6" if text == "inet6" else "any"
