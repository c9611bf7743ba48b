"""Explains the log of a build or a run, with fixes for this machine."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.check import SUBCOMMAND, prepared
from distdiag.commands.cuda_env.diagnose import diagnose
from distdiag.commands.cuda_env.log_fixes import OF_THE_LOG, archs_of, compiler_fix, fitted
from distdiag.commands.cuda_env.sections import sections_of
from distdiag.commands.cuda_env.types import COMMAND, Goal, LogRow, Ready
from distdiag.diagnosis.finding_ids import matches
from distdiag.diagnosis.verdicts import finding
from distdiag.errors import UsageError
from distdiag.ids import RowId
from distdiag.knowledge.cuda import minor
from distdiag.knowledge.known_lines import known_builds
from distdiag.knowledge.logs import read_log, shortened
from distdiag.record import record
from distdiag.report import Finding, Fix, Level, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.cuda_env.archs import Arch
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.commands.cuda_env.types import CudaEnv, Problem, Request
    from distdiag.knowledge.logs import Match
    from distdiag.saved_facts import Gathered

_SHOWN_LINES = 5
_LIKE_AN_ERROR = re.compile(
    r"^(?=.*?(?:error|fail|fatal|abort|killed|cannot|undefined|not found|no such|unable|unsupported|no module|"
    r"no member)).*",
    re.I | re.M,
)
_SIGNS_WITHIN = 4 << 20  # characters
_SUCCESS = (
    "Successfully installed ",
    "Successfully built ",
    "Finished processing dependencies for ",
    "[100%] Built target ",
)
_FAILED = re.compile(
    r"^(?!.*\b(?:warning|notice)\b)(?=.*?(?:error|fail|fatal|traceback|abort|killed|cannot|undefined))", re.I | re.M
)
_ROCM = re.compile(r"/opt/rocm[-\d.]*|\bhipcc\b|-D__HIP_PLATFORM_(?:AMD|HCC)__|\+rocm[\d.]+")
_TORCH = re.compile(
    r"\b(?:torch\.__version__ {0,4}= {0,4}'?|(?:Py)?[Tt]orch(?: version)?:? )(\d+\.\d+\.\d+(?:\+\w+)?)\b"
)
_SITE = re.compile(r"(?<![\w.])(/[^\s'\":,]{1,200}?)/(?:site|dist)-packages/")
_PASSING = re.compile(r"^(?:/var)?/tmp/|/pip-|overlay|/_h_env")
"""Temporary environments of a build, deleted after it."""
_ISOLATED = re.compile(r"[\w./-]{0,60}/pip-build-env-\w+/overlay")
_OLD_ARCH = 75
"""sm_: torch's wheels for CUDA 12.8 and newer lack older architectures."""
_SOURCE = re.compile(
    r"^\s*(?P<file>\S{1,300}\.(?:cu|cuh|cpp|cc|cxx|c|h|hpp|hip))(?:\(\d+\)|:\d+(?::\d+)?): "
    r"(?:fatal )?error:? [^\n]{3,300}",
    re.MULTILINE,
)
_WINDOWS = re.compile(r"\b[A-Z]:\\[\w .\\-]{1,60}")


def judge_log(request: Request, options: runner.Options, log: tuple[str, str]) -> Report[CudaEnv]:
    """Judge a log together with the nodes. `log`: its text, and its unread part. Raises UsageError, DistdiagError."""
    if not log[0].strip():
        raise UsageError(
            "--explain: the log is empty", hint="save the output of the build: pip install -v ... 2>&1 | tee build.log"
        )
    request, gathered = runner.facts_of(SUBCOMMAND, request, options)
    return judge(request, log, prepared(request, gathered))


def judge(request: Request, log: tuple[str, str], gathered: Gathered[CudaFacts]) -> Report[CudaEnv]:
    """Explain the log with this machine's fixes; -v adds the whole report."""
    text, unread = log
    nodes = gathered.facts
    found = read_log(text)
    succeeded = _success(text, found)
    elsewhere = _elsewhere(text, found, nodes)
    at = () if elsewhere else nodes
    here = _Here(
        facts=at[0] if at else None,
        problems=[
            problem for facts in at for section in sections_of(facts, Goal(facts.goal)) for problem in section.problems
        ],
        archs=archs_of(request.gpus, at),
    )
    ids = {match.known.id for match in found}
    shown = [match for match in found if not ids & {*match.known.follows}]
    findings = [_finding(match, here, is_rocm=_ROCM.search(text) is not None) for match in shown]
    if _WINDOWS.search(text):
        findings = [replace(one, fix=Fix(text=one.fix.text) if one.fix else None) for one in findings]
    elif isolated := _ISOLATED.search(text):
        findings = [_with_isolation(one, isolated[0]) for one in findings]
    if succeeded:
        findings = [succeeded, *(replace(one, level=Level.INFO, fix=None) for one in findings)]
    elif not any(one.level is Level.FAIL for one in findings):
        findings = [_nothing(text, found, here), *findings]
    if elsewhere:
        findings.append(finding("build-elsewhere", signs=", ".join(elsewhere)))
    about_archs = any("arch" in one.known.id or "ARCH" in " ".join(one.known.commands) for one in found)
    if request.gpus and not about_archs:
        findings.append(finding("build-gpu", gpus=", ".join(request.gpus)))
    if unread:
        findings.append(finding("build-cut", unread=unread))
    report = diagnose(request, gathered, log=findings)
    causes = [one for one in findings if one.level is Level.FAIL]
    count = text.count("\n") + (not text.endswith("\n"))
    row = LogRow(lines=count, causes=len(causes), others=len(found) - len(causes))
    data = replace(report.data, log=row, ready=Ready(run=None, build=None))
    if not request.verbose:
        data = replace(data, sections=(), silenced=())
    kept = report.findings if request.verbose else tuple(findings)
    worst = causes[0] if causes else findings[0]
    return Report(command=COMMAND, data=data, findings=kept, summary=worst.title, interrupted=report.interrupted)


def _with_isolation(one: Finding, folder: str) -> Finding:
    """Explain pip's build isolation if pip's own torch may have caused the failure."""
    row = known_builds().get(one.id.removeprefix(f"{COMMAND}.log."))
    if row is None or not row.isolated or one.fix is None:
        return one
    text = (
        "build without pip's build isolation: pip install --no-build-isolation (install the package's build "
        f"requirements first). Else: {one.fix.text}"
    )
    why = f"the build ran in pip's isolated environment ({folder}), with a torch fetched for this build only"
    return replace(one, detail=f"{one.detail}\n{why}".strip(), fix=replace(one.fix, text=text))


def _success(text: str, found: Sequence[Match]) -> Finding | None:
    """Report success if a tool reported it, and no error, known or not, follows."""
    at = max(text.rfind(words) for words in _SUCCESS)
    end = text.find("\n", at)
    line = text.count("\n", 0, max(at, 0)) + 1
    if at < 0 or any(match.known.role != "note" and match.last > line for match in found):
        return None
    if end >= 0 and _FAILED.search(text, end):
        return None
    return finding("build-success", evidence=(f"line {line}: {shortened(text[at : end if end >= 0 else None])}",))


def _elsewhere(text: str, found: Sequence[Match], nodes: Sequence[CudaFacts]) -> tuple[str, ...]:
    """List the signs that a log is from another machine or environment; empty if it may match one examined."""
    if not nodes:
        return ()
    signs = _of_another_torch(found, nodes)
    text = text[:_SIGNS_WITHIN]
    if (rocm := _ROCM.search(text)) and not any(facts.torch is not None and facts.torch.hip for facts in nodes):
        signs.append(f"ROCm ({rocm[0]})")
    homes = dict.fromkeys(match[1] for match in _SITE.finditer(text) if not _PASSING.search(match[1]))
    if any(os.path.isdir(home) for home in homes):
        return tuple(signs)
    own = {facts.torch.version for facts in nodes if facts.torch is not None}
    versions = dict.fromkeys(match[1] for match in _TORCH.finditer(text))
    signs += [
        f"torch {number}" for number in versions if own and number not in own and number.partition("+")[0] not in own
    ][:2]
    signs += list(homes)[:1]
    if windows := _WINDOWS.search(text):
        signs.append(windows[0])
    return tuple(signs)


def _of_another_torch(found: Sequence[Match], nodes: Sequence[CudaFacts]) -> list[str]:
    """List builds of torch, by CUDA, in failures of the log but not installed here."""
    own = {minor(facts.torch.cuda) for facts in nodes if facts.torch is not None}
    said = [match.groups["torch"] for match in found if "mismatch" in match.known.id and "torch" in match.groups]
    signs = [f"a torch for CUDA {number}" for number in dict.fromkeys(map(minor, said)) if own and number not in own]
    if own and "" not in own and any(match.known.id == "torch-without-cuda" for match in found):
        signs.append("a torch without CUDA")
    if own == {""} and any(match.known.cuda_torch for match in found):
        signs.append("a torch with CUDA")
    return signs


@record
class _Here:
    """The context for explaining a log: the first node, problems of all nodes, and the GPUs to build for."""

    facts: CudaFacts | None
    problems: Sequence[Problem]
    archs: Sequence[Arch]


def _finding(match: Match, here: _Here, *, is_rocm: bool) -> Finding:
    """Make a finding; prefer the fix of a matching check of this machine."""
    known = match.known
    found = (problem for check in known.checks for problem in here.problems if matches(problem.id, check))
    # A toolkit trap not yet in effect explains no failure.
    found = (problem for problem in found if problem.level is Level.FAIL or not problem.id.startswith("toolkit."))
    own = next((problem for problem in found if problem.to_paste), None) if known.role == "cause" else None
    compiler = compiler_fix(match, here.facts) if here.facts is not None else None
    if compiler is not None and (known.id in OF_THE_LOG or own is None):
        own, (here_too, fix) = None, compiler
    elif own is not None:
        here_too, fix = f"on this machine: {own.title}", Fix(text=own.text, commands=own.to_paste)
    else:
        here_too, fix = _generic(match, here)
    level = {"cause": Level.FAIL, "consequence": Level.INFO}.get(known.role, Level.INFO)
    often = f" ({match.count} times)" if match.count > 1 else ""
    detail = "\n".join(filter(None, (f"affects: {match.known.breaks}" if match.known.breaks else "", here_too)))
    if is_rocm and any("CUDA_HOME" in words for words in (match.known.fix, *fix.commands)):
        fix = Fix(
            text="install a ROCm build of torch: with another torch this build looks for a CUDA toolkit",
            commands=("python -c 'import torch; print(torch.__version__, torch.version.hip)'",),
        )
    return Finding(
        id=RowId(f"{COMMAND}.log.{known.id}"),
        level=level,
        title=match.known.means,
        detail=detail,
        evidence=(f"line {match.line}{often}: {_at_file(match)}", f"source: {known.source}"),
        fix=fix if fix.text else None,
    )


def _at_file(match: Match) -> str:
    """Quote a line, with its file if that is on the line before, as CMake wraps it."""
    return match.quote if not match.file or match.file[:40] in match.quote else f"{match.file}: {match.quote}"


def _generic(match: Match, here: _Here) -> tuple[str, Fix]:
    """Return this machine's toolkits named by the fix of a known failure, if any, and the fix."""
    commands = fitted(tuple(_for_log(each, match) for each in match.known.commands), here.facts, here.archs)
    text = match.known.fix
    if here.facts is None:
        return "", Fix(text=text, commands=commands)
    if not here.archs and any("TORCH_CUDA_ARCH_LIST=" in command for command in match.known.commands):
        text += ". To get the export line for your GPUs, add --gpu: --explain LOG --gpu H100"
    toolkits = fixes.usable_toolkits(here.facts)
    named = [toolkit for toolkit in toolkits if any(f"={toolkit.root}" in command for command in commands)]
    there = ", ".join(f"CUDA {toolkit.version} in {toolkit.root}" for toolkit in named)
    if len(named) == 1 and any(f" CUDA_HOME={named[0].root}" in command for command in commands):
        text = f"use the toolkit in {named[0].root}. In general: {text}"
    return f"on this machine: {there}" if there else "", Fix(text=text, commands=commands)


def _for_log(command: str, match: Match) -> str:
    """Select torch wheels that include the log's architecture."""
    sm = re.match(r"\d+", match.groups.get("sm", ""))
    return command.replace("/whl/cu128", "/whl/cu126") if sm is not None and int(sm[0]) < _OLD_ARCH else command


def _nothing(text: str, found: Sequence[Match], here: _Here) -> Finding:
    """Report that no cause is known, quoting possible errors, or that no line looks like an error."""
    if (source := _SOURCE.search(text)) is not None:
        line = shortened(source[0].strip())
        return finding("build-source", evidence=(line,), line=line)
    following = next((match for match in found if match.known.role == "consequence"), None)
    if following is not None:
        evidence = (f"line {following.line}: {following.quote}",)
        made = finding("build-following", evidence=evidence, means=following.known.means)
        return replace(made, fix=_generic(following, here)[1])
    errors = [match[0].strip() for match in islice(_LIKE_AN_ERROR.finditer(text), _SHOWN_LINES)]
    return finding("build-unknown" if errors else "build-clean", evidence=tuple(shortened(line) for line in errors))
