"""`distdiag config`: the defaults set by variables and files, and the source of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer  # noqa: TC002 - Typer reads the annotations

from distdiag.options import JsonOpt  # noqa: TC001 - as above
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.report import Report

COMMAND = "config"


@record(kw_only=True)
class Setting:
    """A default. `commands` take the option; `is_refused`: the folder's file needs trust for it."""

    option: str
    value: str
    origin: str
    commands: tuple[str, ...]
    is_refused: bool


@record(kw_only=True)
class Config:
    """All defaults; of one option, the strongest first. `files`: possible files, each with "read" or why not."""

    settings: tuple[Setting, ...]
    files: dict[str, str]


def config(ctx: typer.Context, as_json: JsonOpt = False) -> None:
    """Show the defaults set by variables and files, and the source of each.

    The command line overrides a variable (DISTDIAG_HOSTS for --hosts), which overrides ./distdiag.toml, which overrides
    ~/.config/distdiag/config.toml. In a file, an option at the top applies to every command that has it, an option in a
    table to that command alone:

    \b
        hosts = "node[1-4]"
        setup = "source ~/env.sh"
        [trace.blocked]
        threads = "all"

    A file that another user can write is ignored. ./distdiag.toml may be part of a cloned repository: options that run
    programs, log in elsewhere or write files apply only if ~/.config/distdiag/config.toml trusts the folder:

    \b
        trust = ["~/train"]

    Exit status: 0 nothing wrong, 2 a file is not TOML or has an option of no command.

    \b
    Examples:
      distdiag config
      DISTDIAG_HOSTS=node[1-4] distdiag config
    """
    from distdiag.output import Output, deliver

    deliver(COMMAND, lambda: _report(ctx), _view, Output(json=as_json))


def _report(ctx: typer.Context) -> Report[Config]:
    from distdiag import defaults
    from distdiag.diagnosis.wording import counted
    from distdiag.errors import UsageError
    from distdiag.report import Report

    commands = dict(_commands(ctx))
    try:
        read = {file.path: file for file in defaults.files()}
        found: dict[defaults.Default, list[str]] = {}
        for name, parameters in commands.items():
            for default in defaults.of_command(name, parameters, tuple(read.values())):
                found.setdefault(default, []).append(name)
    except ValueError as error:
        raise UsageError(str(error), hint="see distdiag config --help") from error
    options = {option[2:] for parameters in commands.values() for each in parameters for option in each.opts}
    names = {name.split()[0] for name in commands}
    for file in read.values():
        for name, value in file.values.items():
            if name not in (names if isinstance(value, dict) else {*options, defaults.TRUST}):
                what = "command" if isinstance(value, dict) else "option"
                raise UsageError(f"{file.path}: there is no {what} {name}", hint="distdiag --help, distdiag help hosts")
    settings = [
        Setting(
            option=each.option,
            value=each.shown,
            origin=each.origin,
            commands=tuple(names),
            is_refused=each.is_refused,
        )
        for each, names in found.items()
    ]
    states = {path: (read[path].ignored or "read") if path in read else "absent" for path in defaults.paths()}
    refused = sum(each.is_refused for each in settings)
    summary = counted(len(settings), "default") + f", {refused} of them ignored" * bool(refused)
    return Report(command=COMMAND, data=Config(settings=tuple(settings), files=states), findings=(), summary=summary)


def _commands(ctx: typer.Context) -> Iterator[tuple[str, list[Any]]]:
    """List all commands with their parameters."""
    root = ctx.find_root()
    group: Any = root.command
    for name in group.list_commands(root):
        _, command, _ = group.resolve_command(root, [name])
        yield name, command.params
        for below in getattr(command, "commands", ()):
            yield f"{name} {below}", command.resolve_command(root, [below])[1].params
    root.obj.command = COMMAND


def _view(report: Report[Config]) -> Iterator[RenderableType]:
    from rich.table import Column

    from distdiag.defaults import refusal
    from distdiag.output import Whole, plain_table

    if report.data.settings:
        table = plain_table(*(Column(name, overflow="fold") for name in ("option", "value", "from", "commands")))
        for each in report.data.settings:
            few = ", ".join(each.commands) if len(each.commands) < 4 else f"{len(each.commands)} commands"
            table.add_row(each.option, each.value, each.origin + " (ignored)" * each.is_refused, few)
        yield table
        yield ""
    if why := refusal(each.option for each in report.data.settings if each.is_refused):
        yield Whole(why)
    for path, state in report.data.files.items():
        yield Whole(f"{path}: {state}")
