"""What cuda-env is asked for beside its report: what a log says, lines to export, the commands of a build."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.commands.cuda_env.check import SUBCOMMAND, prepared
from distdiag.deliver import say
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.model import Request
    from distdiag.commands.cuda_env.result import CudaEnv
    from distdiag.report import Report


def judge_log(request: Request, options: runner.Options, path: str) -> Report[CudaEnv]:
    """Judge a log, together with the nodes. Raises UsageError, DistdiagError."""
    from distdiag.commands.cuda_env import explain

    log = explain.read(path)
    request, gathered = runner.facts_of(SUBCOMMAND, request, options)
    return explain.judge(request, log, prepared(request, gathered))


def prebuild(request: Request, options: runner.Options, ops: str) -> list[str]:
    """Write the commands that build DeepSpeed. Raises UsageError, DistdiagError."""
    from distdiag.commands.cuda_env.prebuild import commands, read_ops

    wanted = read_ops(ops)
    request, gathered = runner.facts_of(SUBCOMMAND, request, options)
    if not gathered.facts:
        raise DistdiagError("no node told anything", hint="see why: distdiag cuda-env, with the same hosts")
    for host, refusal in gathered.refusals.items():
        say(f"distdiag: {host} was not reached, its GPUs are not in the list: {refusal.message}")
    return commands(prepared(request, gathered).facts, wanted)


def export(request: Request, options: runner.Options) -> list[str]:
    """Write the lines for eval. Raises UsageError, DistdiagError."""
    return exports(SUBCOMMAND.diagnose(*runner.facts_of(SUBCOMMAND, request, options)))


def exports(report: Report[CudaEnv]) -> list[str]:
    """Write the lines for eval; what they do not mend is said on stderr, with its commands."""
    lines = [f"export {name}={value}" if value else f"unset {name}" for name, value in report.data.exports.items()]
    for step in report.data.steps:
        say(f"distdiag: not mended by variables: {step.id}: {step.title}")
        for command in step.commands:
            say(f"    {command}")
    if not lines:
        say("distdiag: no variable needs another value")
    return lines
