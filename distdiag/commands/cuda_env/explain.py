"""What a log of a build or a run says, and what mends it on this machine."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.catalogue import matches
from distdiag.commands.cuda_env.diagnose import diagnose
from distdiag.commands.cuda_env.judge import sections_of
from distdiag.commands.cuda_env.model import COMMAND, Goal
from distdiag.commands.cuda_env.result import LogRow, Ready
from distdiag.deliver import say
from distdiag.errors import UsageError
from distdiag.files import as_text
from distdiag.knowledge.logs import read_log
from distdiag.report import Finding, Fix, Level, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.commands.cuda_env.diagnose import Reached
    from distdiag.commands.cuda_env.model import Problem, Request
    from distdiag.commands.cuda_env.result import CudaEnv
    from distdiag.knowledge.logs import Match

_MOST_BYTES = 256 * 2**20
_LAST_LINES = 5
_PATH = re.compile(r"(?<![\w.$}:/-])/[\w./+-]+(?![\w*?$])")


def read(name: str) -> str:
    """Read a log; "-" is stdin. Raises UsageError."""
    try:
        if name == "-":
            return as_text(sys.stdin.buffer.read(_MOST_BYTES))
        with open(name, "rb") as file:
            head = file.read(_MOST_BYTES // 4)
            size = os.fstat(file.fileno()).st_size
            if size > _MOST_BYTES:  # causes stand at the beginning, and what somebody waited for at the end
                file.seek(size - _MOST_BYTES * 3 // 4)
                say(f"distdiag: {name} is long: its first and last parts are read; the lines of the last count too low")
                head += b"\n"
            return as_text(head + file.read(_MOST_BYTES))
    except OSError as error:
        raise UsageError(f"--explain {name}: {error.strerror}", hint="name the log of a build; - is stdin") from error


def judge(request: Request, text: str, nodes: Sequence[CudaFacts], reached: Reached) -> Report[CudaEnv]:
    """Say what the log means. Of this machine only what mends it is said; -v adds the whole report."""
    if not text.strip():
        raise UsageError("--explain: the log is empty", hint="keep it: pip install -v ... 2>&1 | tee build.log")
    found = read_log(text)
    here = [one for facts in nodes for section in sections_of(facts, Goal.ALL) for one in section.problems]
    findings = [_finding(match, here, nodes) for match in found] or [_nothing(text)]
    report = diagnose(request, nodes, reached, log=findings)
    causes = [one for one in findings if one.level is Level.FAIL]
    row = LogRow(lines=len(text.splitlines()), causes=len(causes), others=len(found) - len(causes))
    data = replace(report.data, log=row, ready=Ready(run=None, build=None))
    if not request.verbose:
        data = replace(data, sections=(), differences=(), silenced=())
    kept = report.findings if request.verbose else tuple(findings)
    worst = causes[0] if causes else findings[0]
    return Report(command=COMMAND, data=data, findings=kept, summary=worst.title, interrupted=report.interrupted)


def _finding(match: Match, here: Sequence[Problem], nodes: Sequence[CudaFacts]) -> Finding:
    """Make a finding; where a check of this machine explains it too, its fix is the better one."""
    known = match.known
    own = next((one for check in known.checks for one in here if matches(one.id, check) and one.to_paste), None)
    if known.role != "cause":
        own = None
    level = {"cause": Level.FAIL, "consequence": Level.INFO}.get(known.role, Level.INFO)
    often = f" ({match.count} times)" if match.count > 1 else ""
    breaks, here_too = f"breaks: {match.breaks}", f"on this machine: {own.title}" if own else ""
    detail = "\n".join(filter(None, (breaks if match.breaks else "", here_too)))
    fix = (
        Fix(text=own.fix, commands=own.to_paste)
        if own
        else Fix(text=match.fix, commands=_fitting(match.commands, nodes))
    )
    return Finding(
        id=f"{COMMAND}.log.{known.id}",
        level=level,
        title=match.means,
        detail=detail,
        evidence=(f"line {match.line}{often}: {match.quote}", f"see {known.source}"),
        fix=fix if fix.text else None,
    )


def _fitting(commands: Sequence[str], nodes: Sequence[CudaFacts]) -> tuple[str, ...]:
    """Keep the commands that fit this machine: for the examined Python, and with no path that is not there."""
    if not nodes:
        return tuple(commands)
    own = fixes.pip(nodes[0])
    found = [re.sub(r"\b(?:python3? -m )?pip install", lambda _: own, command) for command in commands]
    return tuple(command for command in found if all(os.path.exists(path) for path in _PATH.findall(command)))


def _nothing(text: str) -> Finding:
    """Say that nothing is known, and quote what looks like an error; or that nothing looks like one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.search(r"error|fail|fatal|abort|killed|cannot|undefined", line, re.IGNORECASE)
    ]
    if not errors:
        return Finding(
            id=f"{COMMAND}.log.clean",
            level=Level.INFO,
            title="nothing in this log looks like a failure, nor is known as one",
        )
    return Finding(
        id=f"{COMMAND}.log.unknown",
        level=Level.UNKNOWN,
        title="nothing in this log is known; these lines look most like a cause",
        evidence=tuple(line[:200] for line in errors[:_LAST_LINES]),
        fix=Fix(text="look at the first error, not the last: what follows is mostly its consequence"),
    )
