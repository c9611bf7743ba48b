"""What ssh itself would do for a host, as far as a client in this process can do the same."""

from __future__ import annotations

import base64
import binascii
import functools
import glob
import os
import pwd
import re
import shlex
import shutil
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from distdiag.errors import DistdiagError
from distdiag.facts import programs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paramiko import SSHConfig

    from distdiag.cluster.hosts import Host


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
    """Return the first reason, in words, and "" if paramiko will do; None: a key file whose name is unclear."""
    return next(_reasons(said, keys), "")


def is_private_key(path: str) -> bool:
    """Return whether a file can be read and is not the public half of a key."""
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
        yield f"ControlPath {control} is the socket of an open connection"
    for path in keys:
        yield from _of_key(path, identities_only=is_on("IdentitiesOnly"))
    # Debian and Red Hat switch it on for everybody; it does something only for those who have a ticket.
    if is_on("GSSAPIAuthentication") and _has_ticket(shutil.which("klist"), os.environ.get("KRB5CCNAME", "")):
        yield "GSSAPIAuthentication is on and there is a Kerberos ticket"


def _of_key(path: str | None, *, identities_only: bool) -> Iterator[str]:
    if path is None:
        yield "IdentityFile has a token that only ssh expands"
        return
    if os.path.exists(f"{path}-cert.pub"):
        yield f"{path}-cert.pub is a certificate"
    key, public = _read(path), _read(f"{path}.pub")
    private = b"" if key.startswith(_PUBLIC_KEY) else _openssh_format(key)
    if public.startswith(b"sk-") or key.startswith(b"sk-") or any(type_ in private for type_ in _SECURITY_KEYS):
        yield f"{path} is on a security key"
    elif key.startswith(_PUBLIC_KEY):
        yield f"{path} is a public key: it selects a key of the agent"
    elif identities_only and (_has_passphrase(key, private) or (public and not key)):
        yield f"IdentitiesOnly is on, and only the agent can use {path}"


def _openssh_format(key: bytes) -> bytes:
    """Return what is inside a private key in OpenSSH's own format; its public half is there in the clear."""
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
    """Return what is in a key file; nothing if it cannot be read: ssh then passes it over as well."""
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
    """Return whether there is a Kerberos ticket; without klist, only tickets in files can be ruled out."""
    if klist is not None:
        try:
            return programs.run([klist, "-s"], timeout_s=_KLIST_S).status == 0
        except programs.CannotRun:
            return False
    kind, colon, path = (place or f"/tmp/krb5cc_{os.getuid()}").rpartition("FILE:")
    return os.path.exists(path) if colon or path.startswith("/") else bool(kind or path)


Said = dict[str, list[str]]
"""Values by keyword in lower case; a keyword given twice has two."""
_SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_DIRECTIVE = re.compile(r"([A-Za-z0-9]+)(?:[ \t]*=[ \t]*|[ \t]+)(.*)")
_NAMES_A_HOST = frozenset({"hostname", "proxyjump", "canonicalizehostname"})
_DEPTH = 16  # ssh's own limit of files that include files
_DEFAULTS: Said = {
    "port": ["22"],
    "identityfile": [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk")],
    "userknownhostsfile": ["~/.ssh/known_hosts ~/.ssh/known_hosts2"],
    "globalknownhostsfile": ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"],
    "stricthostkeychecking": ["ask"],
    "addressfamily": ["any"],
}


def reader(config_file: str | None, timeout_s: float) -> Callable[[Host], Said]:
    """Return the function that finds out what is set for a host; it raises DistdiagError if ssh would refuse to start.

    Raises:
        DistdiagError: there is no ssh, and without it the configuration cannot be understood.
    """
    if shutil.which("ssh"):
        return functools.partial(_ask, config_file, timeout_s)
    return functools.partial(_look_up, _load(config_file))


def home() -> str:
    """Return the home folder that ssh takes: the one in the user database, whatever $HOME says."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container with a made-up user id
        return os.path.expanduser("~")


def user_name() -> str:
    """Return the name of the local user, as ssh finds it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")


def depends_on_host(config_file: str | None) -> bool:
    """Return whether ssh's configuration might say different things for different hosts; when in doubt, it does."""
    if config_file == "none":
        return False
    if config_file is not None:
        return _depends(config_file, _user_folder(), _DEPTH)
    user_config = os.path.join(_user_folder(), "config")
    return _depends(user_config, _user_folder(), _DEPTH) or _depends(_SYSTEM_CONFIG, "/etc/ssh", _DEPTH)


def _user_folder() -> str:
    return os.path.join(home(), ".ssh")


def _depends(path: str, folder: str, depth: int) -> bool:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            lines = [line.strip(" \t\r\n\f") for line in file]
    except FileNotFoundError:
        return False
    except OSError:  # ssh will say what is wrong
        return True
    return any(_line_depends(line, folder, depth) for line in lines if line and not line.startswith("#"))


def _line_depends(line: str, folder: str, depth: int) -> bool:
    directive = _DIRECTIVE.fullmatch(line)
    if directive is None or "%" in line:
        return True
    keyword, value = directive[1].lower(), directive[2]
    if keyword == "host":
        return value != "*"
    if keyword == "match":
        return value.lower().split() not in (["all"], ["final", "all"])
    if keyword == "include":
        return depth == 0 or re.search(r"[\"'\\$~#]", value) is not None or _include_depends(value, folder, depth)
    return keyword in _NAMES_A_HOST


def _include_depends(patterns: str, folder: str, depth: int) -> bool:
    found = (path for pattern in patterns.split() for path in glob.glob(os.path.join(folder, pattern)))
    return any(_depends(path, folder, depth - 1) for path in found)


def _ask(config_file: str | None, timeout_s: float, host: Host) -> Said:
    argv = ["ssh", "-G", "-T", *(["-F", config_file] if config_file is not None else [])]
    argv += ["-l", host.user] if host.user else []
    argv += ["-p", str(host.port)] if host.port else []
    # HostName may hold tokens, and the zone of an IPv6 address (fe80::1%eth0) is none.
    argv += ["-o", "HostName=" + host.address.replace("%", "%%")] if host.address else []
    argv += ["--", host.name]
    try:
        done = programs.run(argv, timeout_s=timeout_s)
    except programs.CannotRun as error:
        raise DistdiagError(str(error)) from error
    if done.timed_out:
        raise DistdiagError(
            f"ssh did not read its configuration for {host.name} within {timeout_s:g} s",
            hint=f"a Match exec command or a name server blocks it; see: ssh -v {shlex.join(argv[1:])}",
        )
    if done.status != 0:
        complaints = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        complaint = next((line for line in complaints if re.search(r"line \d+: ", line)), "".join(complaints[:1]))
        raise DistdiagError(
            f"ssh will not connect to {host.name}: {complaint.strip() or f'status {done.status}'}",
            hint="fix the ssh configuration; to reproduce: " + shlex.join(argv),
        )
    return _parse(done.stdout.decode("utf-8", "surrogateescape"))


def _parse(text: str) -> Said:
    said: Said = {}
    for line in text.split("\n"):
        keyword, _, value = line.partition(" ")
        said.setdefault(keyword.lower(), []).append(value)
    return said


def _load(config_file: str | None) -> SSHConfig:
    """Read the user's own file with paramiko, unless it holds what paramiko gets wrong."""
    import paramiko

    path = config_file if config_file is not None else os.path.join(_user_folder(), "config")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read() if path != "none" else ""
    except OSError as error:
        if config_file not in (None, "none"):
            raise DistdiagError(f"cannot read {path}: {error.strerror}") from error
        text = ""
    wrong = re.search(r"^[ \t]*\"?(Include|Match)\b.*", text, re.IGNORECASE | re.MULTILINE)
    if wrong is not None:
        raise DistdiagError(
            f"{path} has the line {wrong[0].strip()!r}, which only ssh understands, and ssh is not installed here",
            hint="install the OpenSSH client, or use a configuration without Include and Match",
        )
    try:
        return paramiko.SSHConfig.from_text(text)
    except paramiko.SSHException as error:
        raise DistdiagError(f"cannot read {path}: {error}") from error


def _look_up(config: SSHConfig, host: Host) -> Said:
    found = config.lookup(host.name)
    said = _DEFAULTS | {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    over = {"user": host.user, "port": host.port, "hostname": host.address}
    said |= {key: [str(value)] for key, value in over.items() if value}
    said.setdefault("user", [user_name()])
    said["hostname"] = [said["hostname"][0].lower()]
    for key in {"userknownhostsfile", "globalknownhostsfile", "identityagent"} & said.keys():
        said[key] = [re.sub(r"(^| )~/", lambda start: f"{start[1]}{home()}/", said[key][0])]
    return said


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
    return _settings(host, reader(config_file, timeout_s)(host))


def resolve_all(
    hosts: Sequence[Host], *, config_file: str | None = None, timeout_s: float = _TIMEOUT_S
) -> list[SshSettings | DistdiagError]:
    """Do `resolve` for many hosts: for each, in order, its settings or what would have been raised.

    Ssh is asked once, where its configuration has nothing that could depend on the host, and else for each host.
    """
    try:
        read = reader(config_file, timeout_s)
    except DistdiagError as error:
        return [error] * len(hosts)
    plain = [host for host in hosts if _is_plain(host)]
    template = None
    if len(plain) > 1 and not depends_on_host(config_file):
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
        identity_files=tuple(key for key in keys if key is not None and is_private_key(key)),
        identities_only=value("identitiesonly") in ("yes", "true"),
        identity_agent=_agent(said),
        proxy_jump=tuple(_jump(place) for place in jump.split(",")) if jump else (),
        proxy_command=value("proxycommand"),
        host_key_alias=value("hostkeyalias"),
        user_known_hosts=_paths(said.get("userknownhostsfile", [""])[0]),
        global_known_hosts=_paths(said.get("globalknownhostsfile", [""])[0]),
        strict_host_key_checking=_STRICT.get(strict, strict),
        connect_timeout_s=(float(timeout) or None) if timeout.isdigit() else None,
        bind_address=value("bindaddress"),
        address_family=_family(value("addressfamily")),
        needs_openssh=why_openssh(said, keys),
    )


def _keys(host: Host, said: Said) -> list[str | None]:
    """Return the key files; `ssh -G` leaves their tokens as they are. None stands for a token only ssh can replace."""
    name, user = socket.gethostname(), user_name()
    tokens = {
        "%": "%",
        "d": home(),
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
    return (os.path.expanduser(f"~{owner}") if owner else home()) + slash + rest  # ssh's "~" is not $HOME


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
