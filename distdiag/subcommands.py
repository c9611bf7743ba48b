"""Subcommands as a table. Only the one that was typed is loaded: the others are a name and a line of help."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Sub:
    """One subcommand. `home`: its module below distdiag.commands and its function: "gpu_test.command:gpu_test"."""

    name: str
    home: str
    help: str
    below: tuple[Sub, ...] = ()
    """Subcommands of it, for what it has done: `distdiag overflow -- train.py`, `distdiag overflow show FILE`."""


@dataclass(frozen=True)
class Group:
    """A subcommand that has subcommands. `help` is the line in the list above it, `about` stands on its own page."""

    name: str
    help: str
    about: str
    subs: tuple[Sub, ...] = field(repr=False)


def typed_words() -> list[str]:
    """Give what was typed after the program's name; while TAB is pressed, what is typed so far."""
    asked = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return asked.split()[1:] if os.environ.get("_DISTDIAG_COMPLETE") else sys.argv[1:]


def add(app: typer.Typer, subs: Sequence[Sub | Group], words: Sequence[str]) -> None:
    """Register subcommands, and load the first that is named in `words`."""
    chosen, rest = split(subs, words)
    for one in subs:
        if one is not chosen:
            app.command(one.name, short_help=one.help)(_not_loaded)
        elif isinstance(one, Group):
            app.add_typer(_group(one.name, one.help, one.about, one.subs, rest))
        elif rest and any(rest[0] == sub.name for sub in one.below):
            app.add_typer(_group(one.name, one.help, one.help, one.below, rest))
        else:
            module, _, function = one.home.partition(":")
            app.command(one.name, short_help=one.help)(getattr(import_module(f"distdiag.commands.{module}"), function))


def _group(name: str, line: str, about: str, subs: Sequence[Sub], words: Sequence[str]) -> typer.Typer:
    group = typer.Typer(name=name, help=about, short_help=line, no_args_is_help=True, rich_markup_mode=None)
    add(group, subs, words)
    return group


def split(subs: Sequence[Sub | Group], words: Sequence[str]) -> tuple[Sub | Group | None, Sequence[str]]:
    """Find the first subcommand that is named, and what follows its name; (None, nothing) if none is."""
    names = {one.name: one for one in subs}
    at = next((number for number, word in enumerate(words) if word in names), None)
    return (None, ()) if at is None else (names[words[at]], words[at + 1 :])


def _not_loaded() -> None:
    raise RuntimeError("a subcommand that was not typed is called")
