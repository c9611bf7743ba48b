"""What ssh itself would do for a host, as `ssh -G` has it, and whether paramiko can do the same."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from distdiag.errors import DistdiagError
from distdiag.facts import programs
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.cluster.hosts import Host

    Options = dict[str, list[str]]
    """Values by keyword in lower case, as printed by `ssh -G`; a repeated keyword has several."""

_AT_ONCE = 8
_TIMEOUT_S = 10.0
_MUST_BE_UNSET = (
    *("ProxyJump", "ProxyCommand", "CertificateFile", "PKCS11Provider", "KnownHostsCommand", "RevokedHostKeys"),
    *("BindInterface", "BindAddress"),
)
_MUST_BE_OFF = ("HostbasedAuthentication", "VerifyHostKeyDNS")
_PUBLIC_KEY = (b"ssh-", b"ecdsa-", b"sk-")

_SYSTEM_FILE = "/etc/ssh/ssh_config"
_SYSTEM_FILES = "/etc/ssh/ssh_config.d/*.conf"
"""Included there by most distributions."""
_SAME_FOR_ALL = re.compile(
    rf"""(?:\#.*|host[ \t=]+\*|match[ \t=]+(?:final[ ])?all|include[ \t=]+{re.escape(_SYSTEM_FILES)}
    |(?!(?:host|match|include|hostname|proxyjump|canonicalizehostname)\b)[a-z0-9]+(?:[ \t]*=[ \t]*|[ \t]+)[^%]*)?""",
    re.IGNORECASE | re.VERBOSE,
)
"""A line of ssh_config with the same effect for every host."""
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Names that ssh only lowercases; it rewrites other spellings of an address (127.1, 0:0::1).
_PLAIN_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9._-]*|{_BYTE}(?:\.{_BYTE}){{3}}")


@record(kw_only=True)
class SshSettings:
    """How to connect to `host`, the name as requested.

    `identity_files`: the existing private keys. `uses_agent`: unless IdentityAgent is none. `jumps`: the hosts of
    ProxyJump, [user@]host[:port], the first to connect to first. `proxied`: by ProxyJump or ProxyCommand.
    `needs_openssh`: in words, why only OpenSSH's own client can connect; empty if paramiko can.
    """

    host: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    uses_agent: bool
    host_key_alias: str | None
    user_known_hosts: tuple[str, ...]
    global_known_hosts: tuple[str, ...]
    address_family: Literal["any", "inet", "inet6"]
    jumps: tuple[str, ...]
    proxied: bool
    needs_openssh: str

    @property
    def known_as(self) -> tuple[str, int]:
        """Name and port under which known_hosts has the key; an alias has no port there."""
        return (self.host_key_alias, 22) if self.host_key_alias else (self.hostname, self.port)


def resolve(host: Host, *, config_file: str | None = None, timeout_s: float = _TIMEOUT_S) -> SshSettings:
    """Return ssh's settings for a host, by `ssh -G`; `config_file` as for `ssh -F`.

    Raises:
        DistdiagError: ssh would refuse, is not installed, or took longer than `timeout_s` seconds.
    """
    options = _ask(config_file, timeout_s, host)

    def value(option: str) -> str | None:
        text = options.get(option, ["none"])[0]
        return None if text.lower() == "none" else text

    keys = [re.sub("^~/", f"{home()}/", text) for text in options.get("identityfile", []) if text.lower() != "none"]
    # Without ssh://, and without brackets around anything but an IPv6 address.
    jumps = re.sub(r"ssh://|/(?=,|$)|\[([^\]:]*)\]", r"\1", value("proxyjump") or "")
    return SshSettings(
        host=host.name,
        hostname=options["hostname"][0],
        port=int(options["port"][0]),
        user=options["user"][0],
        identity_files=tuple(key for key in keys if (head := _read(key)) and not head.startswith(_PUBLIC_KEY)),
        uses_agent=value("identityagent") is not None or "identityagent" not in options,
        host_key_alias=value("hostkeyalias"),
        user_known_hosts=_paths(options.get("userknownhostsfile", [""])[0]),
        global_known_hosts=_paths(options.get("globalknownhostsfile", [""])[0]),
        address_family=cast("Literal['any', 'inet', 'inet6']", options.get("addressfamily", ["any"])[0]),
        jumps=tuple(filter(None, jumps.split(","))),
        proxied=bool(value("proxyjump") or value("proxycommand")),
        needs_openssh=next(_reasons(options, keys), ""),
    )


def resolve_all(
    hosts: Sequence[Host], *, config_file: str | None = None, timeout_s: float = _TIMEOUT_S
) -> list[SshSettings | DistdiagError]:
    """Do `resolve` for many hosts: for each, in order, its settings or the exception.

    If the configuration cannot depend on the host, ssh is run once, else once per host.
    """

    def ask(host: Host) -> SshSettings | DistdiagError:
        try:
            return resolve(host, config_file=config_file, timeout_s=timeout_s)
        except DistdiagError as error:
            return error

    plain = [host for host in hosts if _PLAIN_NAME.fullmatch(host.name)]
    template = None
    if len(plain) > 1 and not depends_on_host(config_file):
        template = ask(replace(plain[0], user=None, port=None))
    asked = [host for host in hosts if template is None or not _PLAIN_NAME.fullmatch(host.name)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(ask, asked)
    return [
        next(answers) if template is None or not _PLAIN_NAME.fullmatch(host.name) else _fill(template, host)
        for host in hosts
    ]


def _fill(template: SshSettings | DistdiagError, host: Host) -> SshSettings | DistdiagError:
    if isinstance(template, DistdiagError):
        return template
    return replace(
        template,
        host=host.name,
        hostname=host.name.lower(),
        user=host.user or template.user,
        port=host.port or template.port,
    )


def depends_on_host(config_file: str | None) -> bool:
    """Return whether ssh's configuration might differ between hosts; when in doubt, it does."""
    if config_file == "none":
        return False
    files = [config_file] if config_file is not None else [os.path.join(home(), ".ssh", "config"), _SYSTEM_FILE]
    for path in (*files, *glob.glob(_SYSTEM_FILES)):
        try:
            with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                if not all(_SAME_FOR_ALL.fullmatch(line.strip(" \t\r\n\f")) for line in file):
                    return True
        except FileNotFoundError:
            continue
        except OSError:  # ssh reports the reason
            return True
    return False


def home() -> str:
    """Return ssh's home folder: that of the user database, ignoring $HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container with a made-up user id
        return os.path.expanduser("~")


def _ask(config_file: str | None, timeout_s: float, host: Host) -> Options:
    argv = ["ssh", "-G", "-T", *(["-F", config_file] if config_file is not None else [])]
    argv += ["-l", host.user] if host.user else []
    argv += ["-p", str(host.port)] if host.port else []
    argv += ["--", host.name]
    try:
        done = programs.run(argv, timeout_s=timeout_s)
    except programs.CannotRun as error:
        raise DistdiagError(str(error), hint="install the OpenSSH client (openssh-client)") from error
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
    options: Options = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").split("\n"):
        keyword, _, value = line.partition(" ")
        options.setdefault(keyword.lower(), []).append(value)
    return options


def _paths(text: str) -> tuple[str, ...]:
    paths: list[str] = []
    for piece in text.split(" "):
        if paths and not piece.startswith("/") and not os.path.exists(paths[-1]):
            paths[-1] += f" {piece}"  # a path with a space, which `ssh -G` does not put in quotes
        else:
            paths.append(piece)
    return () if paths[0].lower() in ("", "none") else tuple(paths)


def _reasons(options: Options, keys: Sequence[str]) -> Iterator[str]:
    """List in words the settings supported only by OpenSSH's client."""

    def value(option: str) -> str:
        return options.get(option.lower(), [""])[0].lower()

    def is_on(option: str) -> bool:
        return value(option) in ("yes", "true")

    yield from (f"{option} is set" for option in _MUST_BE_UNSET if value(option) not in ("", "none"))
    yield from (f"{option} is on" for option in _MUST_BE_OFF if is_on(option))
    if value("PubkeyAuthentication") in ("no", "false"):
        yield "PubkeyAuthentication is off"
    if value("IdentityAgent") not in ("", "none", "ssh_auth_sock"):
        yield "IdentityAgent is set"
    control = options.get("controlpath", ["none"])[0]
    if control != "none" and Path(control).is_socket():
        yield f"ControlPath {control} is the socket of an open connection"
    if is_on("IdentitiesOnly") and "SSH_AUTH_SOCK" in os.environ and value("IdentityAgent") != "none":
        yield "IdentitiesOnly is on: it selects keys of the agent"
    for path in keys:
        yield from _reasons_of_key(path)
    # Debian and Red Hat enable it globally; it has an effect only for users with a ticket.
    tickets = os.environ.get("KRB5CCNAME", f"/tmp/krb5cc_{os.getuid()}").removeprefix("FILE:")
    if is_on("GSSAPIAuthentication") and (os.path.exists(tickets) or not tickets.startswith("/")):
        yield "GSSAPIAuthentication is on and there may be a Kerberos ticket"


def _reasons_of_key(path: str) -> Iterator[str]:
    if re.search(r"[%$]|^~", path):
        yield "IdentityFile has a token that only ssh expands"
    if os.path.exists(f"{path}-cert.pub"):
        yield f"{path}-cert.pub is a certificate"
    if _read(path).startswith(_PUBLIC_KEY):
        yield f"{path} is a public key: it selects a key of the agent"
    if _read(f"{path}.pub").startswith(b"sk-"):
        yield f"{path} is on a security key"


def _read(path: str) -> bytes:
    """Read the start of a key file; empty if unreadable: ssh then skips it as well."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return file.read(100)
    return b""
