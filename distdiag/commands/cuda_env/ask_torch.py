"""Runs as `python -c` in the examined environment: imports torch and reports the result.

One JSON line per step, so that earlier results survive a hang or a crash. Creates no context on a GPU.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
import warnings

# Redirect the output of torch and its libraries: stdout is for our records.
_OUT = os.dup(1)
os.dup2(2, 1)


def say(**words: object) -> None:
    """Print one record, unbuffered."""
    os.write(_OUT, (json.dumps(words) + "\n").encode())


def libraries() -> list[str]:
    """List the shared libraries loaded in this process, by path."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {"/" + line.rstrip("\n").partition("/")[2] for line in maps if "/" in line}
    preloaded = {os.path.realpath(path) for path in re.split("[ :]", os.environ.get("LD_PRELOAD", "")) if path}
    return sorted(path for path in paths if re.search(r"\.so(\.|$)", path) or path in preloaded)


def main() -> None:
    """Import torch, and report its version and the GPUs it sees."""
    gc.disable()  # an import makes no garbage; with the freeze at the end, a third less time
    say(about="import")
    try:
        torch = importlib.import_module("torch")
    except BaseException as error:  # noqa: BLE001 - whatever a broken torch raises is the answer
        say(about="failed", error=f"{type(error).__name__}: {error}"[:600], libraries=libraries())
        return
    say(about="torch", version=str(torch.__version__), libraries=libraries(), archs=torch.cuda.get_arch_list())
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        say(about="devices", available=torch.cuda.is_available(), count=torch.cuda.device_count())
    messages = [str(record.message)[:600] for record in heard if "cuda" in str(record.message).lower()]
    say(about="end", warnings=messages, libraries=libraries())


if __name__ == "__main__":
    sys.path[:1] = [] if not sys.path[0] else sys.path[:1]
    main()
    gc.freeze()
