"""How this program was called, so that the commands that it prints can be pasted."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import sys

_OWN_NAME = re.compile(r"(?:^|(?<=: )|(?<=`)|(?<=\$\())distdiag (?=[a-z])")


def called_as() -> str:
    """Return how it was called: by name, by path, as a module, or as the one file of `make zipapp`."""
    called = sys.argv[0]
    if called.endswith("__main__.py"):
        return f"{shlex.quote(sys.executable)} -m distdiag"
    on_path = shutil.which("distdiag")
    if on_path and os.path.exists(called) and os.path.samefile(on_path, called):
        return "distdiag"
    return _as_one_file() or shlex.quote(os.path.abspath(called))


def is_one_file() -> bool:
    """Return whether this runs from the single file of `make zipapp`, without an installed environment."""
    return bool(_as_one_file())


@functools.cache
def _as_one_file() -> str:
    """Return `python3 distdiag.pyz` as typed; empty if this is not that file."""
    import zipfile

    called = sys.argv[0]
    is_one_file = os.path.isfile(called) and zipfile.is_zipfile(called)
    return shlex.join([sys.orig_argv[0], called]) if is_one_file else ""


def as_called(text: str) -> str:
    """Replace `distdiag` in commands and hints with the zipapp's command, if not installed."""
    if "distdiag " not in text or not (program := _as_one_file()):
        return text
    return _OWN_NAME.sub(lambda _: f"{program} ", text)
