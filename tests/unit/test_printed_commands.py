"""Every `distdiag ...` command that distdiag prints exists, with the options that it is printed with.

All string constants of the package are read, and those of knowledge/*.toml. Commands that are put together are read
where they are written as one f-string, as one list that begins with the program, or as a call of `again()`.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer import Context

from distdiag.cli import _SUBCOMMANDS
from distdiag.lazy_typer import Invocation, Sub, load

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parents[2] / "distdiag"
VALUE = "\0"
"""Where an f-string has a placeholder."""
START = re.compile(rf"(?:(?<![\w/.-])distdiag(?:\.pyz)?|{VALUE}) +(?P<command>[a-z][a-z-]*)(?![\w.'])(?P<rest>[^\n]*)")
END = re.compile(r"[;|`)\"]|[,:.](?= |$)| #|  | && | > | 2>")
BY_NAME = {subcommand.name: subcommand for subcommand in _SUBCOMMANDS}
LAUNCHED = ("gpu-test", "allreduce-bench")
"""The commands whose runs launch/ prints again, with other options."""


def problem(command: str, rest: str, *, is_certain: bool) -> str:
    """Return the error in a printed command line, or an empty string. `is_certain`: "distdiag" precedes it."""
    subcommand = BY_NAME.get(command)
    if subcommand is None:
        return f"no command {command!r}" if is_certain and looks_typed(command, rest) else ""
    words = split(rest)
    if words and (below := {sub.name: sub for sub in subcommand.below}).keys() & {words[0]}:
        subcommand, words = below[words[0]], words[1:]
    elif words and not subcommand.home and re.fullmatch(r"[a-z-]+", words[0]) and is_certain:
        return f"{command} has no subcommand {words[0]!r}"
    return misfit(subcommand, words) if subcommand.home else ""


def looks_typed(word: str, rest: str) -> bool:
    """Return whether a word after "distdiag" is meant as a command, and does not just go on with a sentence."""
    return "-" in word or bool(get_close_matches(word, BY_NAME, cutoff=0.75)) or bool(re.match(r" +--?\w", rest))


def split(rest: str) -> list[str]:
    """Split what follows a command into words: up to the end of the command, each placeholder one word."""
    rest = rest.lstrip(VALUE) if rest.startswith(VALUE) else rest
    end = END.search(rest)
    text = rest[: end.start()] if end else rest
    try:
        return shlex.split(text.replace(VALUE, "1"))
    except ValueError:  # the quotation mark of a sentence around it
        return text.replace(VALUE, "1").replace("'", " ").split()


@cache
def parsed(subcommand: Sub) -> Any:  # noqa: ANN401 - Typer's command is private
    """Return a subcommand as Typer's command; it keeps nothing of a line that it parses."""
    return load(subcommand, (), Invocation(()))


def misfit(subcommand: Sub, words: list[str]) -> str:
    """Parse the words as the command does, but for the types of values; return its complaint."""
    command = parsed(subcommand)
    try:
        command.make_parser(Context(command)).parse_args(list(words))
    except Exception as error:  # noqa: BLE001 - Typer's own exceptions are private
        return f"{subcommand.name}: {error}"
    return ""


def problems_in(text: str) -> list[str]:
    """List the errors of the commands in a text."""
    found = [
        problem(match["command"], match["rest"], is_certain=not match[0].startswith(VALUE))
        for match in START.finditer(text)
    ]
    return [complaint for complaint in found if complaint]


def text_of(node: ast.expr) -> str:
    """Return the text of a constant or an f-string, with VALUE where something else is put in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else VALUE
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return VALUE


def name_of(node: ast.AST) -> str:
    """Return `b` for the name b and for the attribute a.b, else an empty string."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def printed(path: Path) -> Iterator[tuple[int, str]]:
    """List line and text of all that a module may print as a command."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = [*ast.walk(tree)]
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in inside:
            yield node.lineno, text_of(node)
        elif isinstance(node, ast.List | ast.Tuple):
            words = [element for element in node.elts if not isinstance(element, ast.Starred)]
            if words and any(name_of(part) == "program" for part in ast.walk(words[0])):
                yield node.lineno, " ".join([VALUE, *map(text_of, words[1:])])
        elif isinstance(node, ast.Call) and name_of(node.func) == "again":
            yield from ((node.lineno, text) for text in repeated(path, node))


def repeated(path: Path, call: ast.Call) -> list[str]:
    """Return the commands written by a call of again(): its own command, or those served by launch/."""
    if isinstance(call.func, ast.Name):  # again(request, "pyspy-all", "--native")
        return [" ".join(["distdiag", *(text_of(word) for word in call.args[1:] if not isinstance(word, ast.Starred))])]
    home = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    every = [(sub, sub.name) for sub in _SUBCOMMANDS]
    every += [(below, f"{sub.name} {below.name}") for sub in _SUBCOMMANDS for below in sub.below]
    homes = {sub.home.partition(":")[0].removesuffix(".command"): name for sub, name in every if sub.home}
    own = max((name for name in homes if home.startswith(f"commands.{name}.")), key=len, default="")
    names = [homes[own]] if own else list(LAUNCHED) if home.startswith("launch.") else []
    words = [text_of(word) for word in call.args if not isinstance(word, ast.Starred)]
    for keyword in call.keywords:
        if keyword.arg is None:  # **options, which a test of that command reads
            continue
        value = text_of(keyword.value)
        words += [value] if keyword.arg == "extra" else [f"--{keyword.arg}".replace("_", "-"), value] if value else []
        words += [f"--{keyword.arg}".replace("_", "-")] if not value and keyword.arg != "extra" else []
    return [" ".join(["distdiag", name, *words]) for name in names]


def in_toml(value: object) -> Iterator[str]:
    """List all strings of a TOML document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from in_toml(inner)


def test_every_command_that_the_package_prints_exists() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {complaint}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in printed(path)
        for complaint in problems_in(text)
    ]
    assert not found, "\n".join(found)


def test_every_command_that_the_knowledge_prints_exists() -> None:
    found = [
        f"{path.name}: {text!r}: {complaint}"
        for path in sorted(PACKAGE.rglob("*.toml"))
        for text in in_toml(tomllib.loads(path.read_text("utf-8")))
        for complaint in problems_in(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "distdiag pyspy-all --rank 2",
        "see it: distdiag pyspy-al",
        "distdiag prots gpu01",
        "distdiag stacks --native",
        f"{VALUE} pyspy-all --rank {VALUE}",
        "distdiag core-bt --pid",
        "distdiag trace block --pid 7",
        "run `distdiag trace fds --rnak 0`",
        "distdiag overflow show --bath 3 FILE",
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str) -> None:
    assert problems_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "distdiag pyspy-all --pid 2; other --rank 2",
        f"{VALUE} pyspy-all{VALUE}",
        'eval "$(distdiag cuda-env --export)".',
        "distdiag overflow -- train.py --rank 3",
        "distdiag overflow --nproc 2 -- train.py",
        "distdiag was started by another user; distdiag runs here",
        "python -m distdiag.training.breakpoint.console",
    ],
)
def test_a_command_that_exists_is_not_reported(text: str) -> None:
    assert not problems_in(text)


def test_commands_that_are_put_together_are_read(tmp_path: Path) -> None:
    source = PACKAGE / "commands" / "core_bt" / "diagnose.py"
    calls = ast.parse(
        'again(request, "pyspy-all", "--rank", rank)\nrequest.again("--pit", pid)\nrequest.again(nproc="2")'
    )
    first, second, third = (step.value for step in calls.body if isinstance(step, ast.Expr))
    assert isinstance(first, ast.Call)
    assert isinstance(second, ast.Call)
    assert isinstance(third, ast.Call)
    assert [problems_in(text)[0].partition(":")[0] for text in repeated(source, first)] == ["pyspy-all"]
    assert [problems_in(text)[0].partition(":")[0] for text in repeated(source, second)] == ["core-bt"]
    assert not any(problems_in(text) for text in repeated(PACKAGE / "launch" / "findings.py", third))
    (tmp_path / "module.py").write_text('" ".join([request.program, "pyspy-all", "--rank", rank, *typed])\n')
    assert [text for _, text in printed(tmp_path / "module.py") if problems_in(text)]
