"""Reports as self-contained HTML pages of one design, which make no network requests."""

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

    Reduce = Callable[[Mapping[str, Any]], Mapping[str, object]]
    """Reduces the data of a report to the part that the page shows."""

# JSON in a script element: these characters could close it, or start a comment that swallows the page.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})
_SHARED = ("version", "command", "verdict", "exit_code", "summary")


def check_place(path: str) -> None:
    """Check that a page can be written, before collecting anything. Raises UsageError."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UsageError(f"--html {path}: cannot write this file", hint="choose a writable path")


def whole(data: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the data of a report unreduced, as a page reads it."""
    return {"data": data}


def write_page(report: Report[Any], path: str, reduce: Reduce = whole, *, strict: bool) -> None:
    """Write the page of a report. Raises DistdiagError."""
    write_whole(path, make_page(document(report, strict=strict), reduce).encode())


def make_page(content: Mapping[str, Any], reduce: Reduce = whole) -> str:
    """Format a report, the document of --json, as one ASCII page.

    Names in it are untrusted: they are embedded as JSON and shown as text. As a second defence the page's policy allows
    only this package's script and style, by hash, and no requests.
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
    """Deduplicated values, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        """Return the number of a value, assigning the next to a new value."""
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[Hashable]:
        """Return all values, ordered by number."""
        return list(self._numbers)


def _text(name: str) -> str:
    return files("distdiag.pages").joinpath(name).read_text("ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
