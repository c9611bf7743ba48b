"""Ssh's configuration for a host, in ssh's own words: from `ssh -G`, which connects nowhere.

Nobody else reads ssh_config right; paramiko, which we fall back to, takes no Include and believes every Match.
"""

from __future__ import annotations

import functools
import glob
import os
import pwd
import re
import shlex
import shutil
from typing import TYPE_CHECKING

from distdiag.errors import DistdiagError
from distdiag.node import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from paramiko import SSHConfig

    from distdiag.cluster.hosts import Host

Said = dict[str, list[str]]
"""Values by keyword in lower case; a keyword that was said twice has two."""
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
    """Give the function that finds out what is set for a host; it raises DistdiagError if ssh would refuse to start.

    Raises:
        DistdiagError: there is no ssh, and without it the configuration cannot be understood.
    """
    if shutil.which("ssh"):
        return functools.partial(_ask, config_file, timeout_s)
    return functools.partial(_look_up, _load(config_file))


def home() -> str:
    """Give the home folder that ssh takes: the one in the user database, whatever $HOME says."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container with a made-up user id
        return os.path.expanduser("~")


def user_name() -> str:
    """Give the name of the local user, as ssh finds it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")


def depends_on_host(config_file: str | None) -> bool:
    """Tell whether ssh's configuration might say different things for different hosts; when in doubt, it does."""
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
        done = run.run(argv, timeout_s=timeout_s)
    except run.CannotRun as error:
        raise DistdiagError(str(error)) from error
    if done.timed_out:
        raise DistdiagError(
            f"ssh did not read its configuration for {host.name} within {timeout_s:g} s",
            hint=f"a command of Match exec or a name server keeps it waiting; see: ssh -v {shlex.join(argv[1:])}",
        )
    if done.status != 0:
        complaints = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        complaint = next((line for line in complaints if re.search(r"line \d+: ", line)), "".join(complaints[:1]))
        raise DistdiagError(
            f"ssh will not connect to {host.name}: {complaint.strip() or f'status {done.status}'}",
            hint="ssh's configuration has to be mended; to see it again: " + shlex.join(argv),
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
            f"{path} has the line {wrong[0].strip()!r}, which only ssh understands, and there is no ssh here",
            hint="install OpenSSH's client, or write a file without Include and Match and give that one",
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
