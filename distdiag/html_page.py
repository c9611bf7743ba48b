"""Pages that need no network: a template, its data as JSON, and a policy that runs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from importlib.resources import files
from typing import Any

from distdiag.errors import UsageError

# The JSON stands in a script element: these characters could end it, or start a comment that swallows the page.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def check_place(path: str) -> None:
    """Check beforehand that a page can be written, so that nothing is lost for that. Raises UsageError."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UsageError(f"--html {path}: cannot write this file", hint="choose a writable path")


def fill(package: str, template: str, data: Any) -> str:  # noqa: ANN401 - any JSON
    """Fill data into a template of a package, in ASCII.

    Names in the data are untrusted: they reach the page as JSON and are shown as text. If that ever failed, the
    page's policy runs only the script and the style of the template, known by their hashes, and allows no request.
    """
    page = files(package).joinpath(template).read_text("ascii")
    for element in ("style", "script"):
        page = page.replace(f"@{element}-hash@", _hash_inside(page, element))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return page.replace("@data@", text.translate(_ESCAPES), 1)


def _hash_inside(page: str, element: str) -> str:
    inside = re.search(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    assert inside is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()}'"
