"""Start of the agent: a Python program, and the shell lines that find a Python for it on a host.

The lines are sent to the stdin of a plain `sh`, so that no login shell, ssh or container tool splits or requotes them.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import sys

from distdiag.agent import boot, protocol, wire

_READY = b"\n" + wire.MARK + protocol.Ready().to_json() + b"\n"
AGENT_START = f"import os\nos.write(1,{_READY!r})\n{boot.START}"
"""boot.START with a ready message: the shell before it may read ahead, and would swallow earlier input."""
_NAMES = ("python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.9")
_FLAGS = "-S -c"
"""The agent needs no site-packages; loading them takes as long as the rest of Python's start."""
_OLD_ENOUGH = "import sys;sys.exit(sys.version_info<(3,9))"
_HAS_TORCH = 'import sys,importlib.util as u;sys.exit(sys.version_info<(3,9) or u.find_spec("torch") is None)'
_DECODE = "import sys;from base64 import b64decode as d;exec(d(sys.argv.pop(1)))"

# Test that only root or this user can have placed a program: root or this user owns its file and all folders above,
# and others cannot write there (or not replace entries: the sticky bit).
TRUSTED = """distdiag_trusted() {
case $1 in *[[:space:]*?[]*|[!/]*) return 1;; esac
p=$1
while :; do
set -- $(ls -ldn "$p")
[ "$3" = 0 ] || [ "$3" = "$(id -u)" ] || return 1
case $1 in d????????[tT]*) ;; ?????w*|????????w*) return 1;; esac
[ "$p" = / ] && return 0
p=${p%/*}; p=${p:-/}
done
}"""

# A running job has the right environment: its interpreter precedes python3. Any user can start a process that looks
# like a rank, and we often are root.
_OF_THE_JOB = (
    'for d in /proc/[0-9]*; do if grep -qsz "^WORLD_SIZE=" "$d/environ"; then e=$(readlink "$d/exe"); '
    'case "$e" in *python*) distdiag_trusted "$e" && echo "$e";; esac; fi; done 2>/dev/null | sort -u | head -n 4'
)


# A blocked setup would outlive its connection, which shows once an empty line cannot be written.
_WATCH = (
    "( trap '' PIPE; while sleep 1 >/dev/null 2>&1; kill -0 $$ 2>/dev/null && echo >&2 2>/dev/null; do :; done; "
    "kill -HUP 0 ) </dev/null >/dev/null & distdiag_watch=$!"
)


def shell(setup: str | None) -> str:
    """Return the shell for the lines: bash if the user gave a setup, as `source` is bash's."""
    return "bash" if setup else "sh"


def lines(payload_bytes: int, *, python: str | None, setup: str | None, needs_torch: bool) -> bytes:
    """Return the lines that start the agent, which then reads `payload_bytes` bytes of payload from stdin."""
    start = base64.b64encode(AGENT_START.encode()).decode()
    body = script([_DECODE, start, str(payload_bytes)], python=python, setup=setup, needs_torch=needs_torch)
    # One command: bash reads line by line, and would leave the rest to Python.
    return f"{{\n{body}}}\n".encode()


def script(program: list[str], *, python: str | None, setup: str | None, needs_torch: bool) -> str:
    """Return the lines that run `python -c program[0] program[1:] distdiag-agent` in the best Python on the host."""
    arguments = " ".join(shlex.quote(word) for word in [*program, "distdiag-agent"])
    send = f'printf "\\036{wire.MARK[1:].decode()}%s\\n"'
    parts = []
    if setup:
        parts.append(_WATCH)
        parts.append(f"{{ {setup}\n}} </dev/null 1>&2")
        parts.append("{ kill $distdiag_watch; wait $distdiag_watch; } 2>/dev/null || :")
    # Once, for all attempts: the payload may be an argument, and a command line has its limit.
    parts.append(f'distdiag_run() {{ exec "$1" {_FLAGS} {arguments}; }}')
    if python:
        missing = protocol.NoPython(tried=python).to_json().decode()
        given = shlex.quote(python)
        parts.append(f"if command -v {given} >/dev/null; then distdiag_run {given}; fi")
        parts.append(f"{send} {shlex.quote(missing)}")
        return "\n".join(parts) + "\nexit 0\n"
    parts.append(TRUSTED)
    parts.append(
        'distdiag_try() { command -v "$2" >/dev/null && "$2" $3 -c "$1" </dev/null >/dev/null 2>&1 && '
        'distdiag_run "$2"; }'
    )
    real = os.path.realpath(sys.executable)
    if not needs_torch and re.fullmatch(r"python3\.(9|[1-9][0-9])", os.path.basename(real)):
        # The name proves the version: this saves every node the start of a Python for a version check.
        own = shlex.quote(sys.executable)
        parts.append(f"if [ -x {own} ] && [ {own} -ef {shlex.quote(real)} ]; then distdiag_run {own}; fi")
    nearest = f'{shlex.quote(sys.executable)} "$CONDA_PREFIX/bin/python" "$VIRTUAL_ENV/bin/python"'
    for check in [_HAS_TORCH, _OLD_ENOUGH] if needs_torch else [_OLD_ENOUGH]:
        for places in (nearest, f"$({_OF_THE_JOB})", " ".join(_NAMES)):
            flags = "" if check is _HAS_TORCH else "-S"
            parts.append(f'for p in {places}; do distdiag_try {shlex.quote(check)} "$p" {flags}; done')
    missing = protocol.NoPython(tried="python3").to_json().decode()
    parts.append(f"{send} {shlex.quote(missing)}")
    return "\n".join(parts) + "\nexit 0\n"
