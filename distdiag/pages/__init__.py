"""Reports as pages for a browser: one design, one file each, without any request to a network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.errors import UsageError
from distdiag.files import write_whole
from distdiag.output import document

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from distdiag.report import Report

    Reduce = Callable[[Mapping[str, Any]], dict[str, Any]]
    """What a command's page shows of the data of its report."""

# The JSON stands in a script element: these characters could end it, or start a comment that swallows the page.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})
_SHARED = ("version", "command", "verdict", "exit_code", "summary")


def check_place(path: str) -> None:
    """Check before anything is collected that a page can be written. Raises UsageError."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UsageError(f"--html {path}: cannot write this file", hint="choose a writable path")


def whole(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a report as its page reads it where nothing is left out or shared."""
    return {"data": data}


def write_page(report: Report[Any], path: str, reduce: Reduce = whole, *, strict: bool) -> None:
    """Write the report of a command that has a page. Raises DistdiagError."""
    write_whole(path, make_page(document(report, strict=strict), reduce).encode())


def make_page(content: Mapping[str, Any], reduce: Reduce = whole) -> str:
    """Format a report, the same document that --json prints, as one page in ASCII.

    Names in it are untrusted: they reach the page as JSON and are shown as text. If that ever failed, the page's
    policy runs only the script and the style of this package, known by their hashes, and allows no request.
    """
    name = content["command"].replace("-", "_")
    shown = {
        **{key: content[key] for key in _SHARED},
        "findings": [{**finding, "where": folded_where(finding["where"])} for finding in content["findings"]],
        **reduce(content["data"]),
    }
    style, script = _text("page.css"), _text("page.js") + _text(f"{name}.js")
    page = _text("page.html").replace("@command@", content["command"])
    for element, inside in (("style", style), ("script", script)):
        page = page.replace(f"@{element}-hash@", _hash(inside)).replace(f"@{element}@", inside)
    text = json.dumps(shown, separators=(",", ":"), allow_nan=False)
    return page.replace("@data@", text.translate(_ESCAPES), 1)


def folded_where(where: Mapping[str, Any]) -> dict[str, str]:
    """Fold hosts, ranks and pids: "node[0-7]", "0-1,3-511"."""
    return {"hosts": fold(where["hosts"]), "ranks": fold_ranks(where["ranks"]), "pids": fold_ranks(where["pids"])}


class Pool:
    """Values by number, each held once."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        """Return the number of a value, a new one for a new value."""
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[Hashable]:
        """Return all values by number."""
        return list(self._numbers)


def _text(name: str) -> str:
    return files("distdiag.pages").joinpath(name).read_text("ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
