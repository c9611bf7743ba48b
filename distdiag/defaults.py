"""Defaults for options from DISTDIAG_* variables, ./distdiag.toml and ~/.config/distdiag/config.toml, in this order.

Top-level options of a file apply to every command that has them, options in a table ([hang], [trace.blocked]) to that
command. A file is read only if no user but this one and root can have written it. The folder's file may be part of a
cloned repository: its options that run programs, log in elsewhere or write files apply only if the user's file lists
the folder under `trust`.
"""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

PREFIX = "DISTDIAG_"
INTERNAL = {"DISTDIAG_LINES", "DISTDIAG_OVERFLOW", "DISTDIAG_RUN", "DISTDIAG_TOKEN", "DISTDIAG_NONCE"}
"""Variables by which distdiag reaches the processes of a job."""
_SELECTORS = ("from_", "hosts", "hostfile", "slurm_job", "kube")
_NEEDS = {"via": ("hosts", "hostfile"), "launcher": ("hosts", "hostfile")} | dict.fromkeys(
    ("namespace", "context", "container", "kube_debug"), ("kube",)
)
"""Options invalid without one of these selectors; defaults for these apply only with one."""
TRUST = "trust"
"""In the user's file: folders whose distdiag.toml may set any option."""
_HARMLESS_ON_HOSTS = ("fanout", "host_timeout")
_ACTS = ("exe", "inject", "master_addr", "native", "on_stall", "sanitizer", "sbatch", "trigger")
"""Options that run a program, connect elsewhere, or stop, pause or write to processes."""


@record
class Default:
    """The value of one option, and the variable or file that sets it.

    Attributes:
        parameter: its name in the command.
        is_refused: it needs trust, and the user's file does not trust the folder.
    """

    option: str
    parameter: str
    value: Any
    origin: str
    is_refused: bool = False

    @property
    def shown(self) -> str:
        """The value as it is typed."""
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        return " ".join("true" if value is True else shlex.quote(str(value)) for value in values)


@record
class File:
    """A file of defaults. `ignored`: why it is not read, "" if it is."""

    path: str
    values: Mapping[str, Any]
    ignored: str = ""
    is_trusted: bool = True


def paths() -> tuple[str, str]:
    """Return the configuration files' paths, highest priority first."""
    above = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    try:
        here = os.getcwd()
    except OSError:  # it was removed; a command that needs it names the problem
        here = ""
    return os.path.join(here, "distdiag.toml"), os.path.join(above, "distdiag", "config.toml")


def exist() -> bool:
    """Return whether any default may be set; quick, because every command asks."""
    return any(name.startswith(PREFIX) for name in os.environ) or any(map(os.path.exists, paths()))


def files() -> tuple[File, ...]:
    """Read the existing files, highest priority first. Raises ValueError for invalid TOML."""
    here, own = (_read(path) if os.path.exists(path) else None for path in paths())
    if here:
        trusted = own.values.get(TRUST, []) if own else []
        if not isinstance(trusted, list) or not all(isinstance(folder, str) for folder in trusted):
            raise ValueError(f"{paths()[1]}: {TRUST} takes a list of folders")
        folder = os.path.realpath(os.path.dirname(here.path))
        is_trusted = folder in [os.path.realpath(os.path.expanduser(each)) for each in trusted]
        here = replace(here, is_trusted=is_trusted)
    return tuple(file for file in (here, own) if file)


def chosen(command: str, parameters: Sequence[Any], given: Container[str], read: Sequence[File]) -> tuple[Default, ...]:
    """Return the defaults for a command line. `given`: names of the typed parameters; `read`: the files.

    With saved facts, explicit hosts or a launcher, no default selects hosts. Raises ValueError: the table of this
    command has an unknown option, or a value of a wrong type.
    """
    from distdiag.facts.process.rank_identity import identify

    found: dict[str, Default] = {}
    for default in of_command(command, parameters, read):
        if default.parameter not in given and not default.is_refused:
            found.setdefault(default.parameter, default)
    is_decided = "from_" in given or identify(os.environ) is not None
    hosts = {each.name for each in parameters if getattr(each, "rich_help_panel", "") == "Hosts"} if is_decided else ()
    selectors = {name for name in _SELECTORS if name in given} or {*[name for name in found if name in _SELECTORS][:1]}

    def is_used(name: str) -> bool:
        if name in _SELECTORS:
            return name in selectors
        return name not in _NEEDS or not selectors.isdisjoint(_NEEDS[name])

    return tuple(default for name, default in found.items() if name not in hosts and is_used(name))


def refusal(options: Iterable[str]) -> str:
    """Return the line about options that need trust; "" without any."""
    names = sorted(set(options))
    here, own = paths()
    how = f'to allow: {TRUST} = ["{os.path.dirname(here)}"] in {own}'
    return f"{here}: {', '.join(names)} ignored; {how}" if names else ""


def of_command(command: str, parameters: Sequence[Any], read: Sequence[File]) -> Iterator[Default]:
    """List the defaults of a command, the strongest first. Raises ValueError, as `chosen`."""
    options = {option[2:]: each for each in parameters for option in each.opts if option.startswith("--")}
    for name, parameter in options.items():
        variable = PREFIX + name.upper().replace("-", "_")
        if variable not in INTERNAL and (text := os.environ.get(variable)) is not None:
            yield Default(
                f"--{name}", parameter.name, tuple(shlex.split(text)) if parameter.multiple else text, variable
            )
    for file in read:
        own = _table(file.values, command)
        for name in own:
            if name not in options and not isinstance(own[name], dict):
                raise ValueError(f"{file.path}: {command} has no option --{name}")
        for name, parameter in options.items():
            value = own.get(name, file.values.get(name))
            if value is not None and not isinstance(value, dict):
                is_refused = not file.is_trusted and _needs_trust(parameter)
                yield Default(f"--{name}", parameter.name, _fit(value, parameter, file.path), file.path, is_refused)


def _needs_trust(parameter: Any) -> bool:  # noqa: ANN401 - Typer's option is private
    """Return whether an option runs programs, logs in elsewhere or writes files."""
    is_for_hosts = getattr(parameter, "rich_help_panel", "") == "Hosts" and parameter.name not in _HARMLESS_ON_HOSTS
    return is_for_hosts or parameter.name in _ACTS or parameter.metavar in ("DIR", "FILE")


def _table(values: Mapping[str, Any], command: str) -> Mapping[str, Any]:
    for word in command.split():
        inner = values.get(word)
        values = inner if isinstance(inner, dict) else {}
    return values


def _fit(value: Any, parameter: Any, path: str) -> Any:  # noqa: ANN401 - as TOML has it
    if isinstance(value, list) and not parameter.multiple:
        raise ValueError(f"{path}: {parameter.opts[0]} takes one value, not a list")
    return value if not parameter.multiple else tuple(value) if isinstance(value, list) else (value,)


def _read(path: str) -> File:
    import tomllib

    from distdiag.facts import private_files

    try:
        place = private_files.follow(path)
        file = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, "rb") as stream:
            if why := _untrusted(os.fstat(file), os.stat(os.path.dirname(place)), path):
                return File(path, {}, why)
            return File(path, tomllib.load(stream))
    except OSError as error:
        return File(path, {}, error.strerror or str(error))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _untrusted(file: os.stat_result, folder: os.stat_result, path: str) -> str:
    """Return why another user may have written a file; "" if impossible."""
    ours = (os.geteuid(), 0)
    if not stat.S_ISREG(file.st_mode):
        return "not a file"
    if file.st_uid not in ours or folder.st_uid not in ours:
        return "another user owns it or its folder"
    if file.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write it: chmod go-w {shlex.quote(path)}"
    return ""
