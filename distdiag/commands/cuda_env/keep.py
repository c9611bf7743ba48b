"""Everything that cuda-env is asked beside its report: saved facts, exports, the commands of a build."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - this module is only imported when there is work to do

from distdiag.commands.cuda_env.check import look
from distdiag.commands.cuda_env.collect import CudaFacts  # noqa: TC001 - decoded by its annotations
from distdiag.commands.cuda_env.diagnose import Reached, diagnose
from distdiag.commands.cuda_env.judge import sections_of
from distdiag.commands.cuda_env.model import Goal
from distdiag.deliver import Progress, say
from distdiag.errors import DistdiagError, UsageError
from distdiag.files import make_folder, named_files, write_for_host
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.model import Request
    from distdiag.commands.cuda_env.result import CudaEnv
    from distdiag.report import Report

_SCHEMA = "distdiag-cuda-env/1"


class Saved(msgspec.Struct, frozen=True):
    """One host's file."""

    schema: str
    node: CudaFacts


@dataclass(frozen=True, kw_only=True)
class Files:
    """What is to be written and read; empty: nothing."""

    save: str = ""
    saved: tuple[str, ...] = ()
    log: str = ""


def answer(request: Request, files: Files) -> Report[CudaEnv]:
    """Look at the nodes, or read what was saved, and judge; a log is judged together with them.

    Raises:
        UsageError: the options contradict each other, or a file cannot be read or written.
        DistdiagError: the node side failed on this machine.
    """
    if not files.log:
        return diagnose(request, *facts_of(request, files))
    from distdiag.commands.cuda_env import explain

    text = explain.read(files.log)
    return explain.judge(request, text, *facts_of(request, files))


def prebuild(request: Request, files: Files, ops: str) -> list[str]:
    """Write the commands that build DeepSpeed. Raises UsageError, DistdiagError."""
    from distdiag.commands.cuda_env.prebuild import commands, read_ops

    wanted = read_ops(ops)
    nodes, reached = facts_of(request, files)
    if not nodes:
        raise DistdiagError("no node told anything", hint="see why: distdiag cuda-env, with the same hosts")
    for host, refusal in reached.refusals.items():
        say(f"distdiag: {host} was not reached, its GPUs are not in the list: {refusal.message}")
    return commands(nodes, wanted)


def transport(request: Request) -> list[str]:
    """Write how the hosts would be reached."""
    from distdiag.commands.cuda_env.check import explain as explain_transport

    return explain_transport(request)


def facts_of(request: Request, files: Files) -> tuple[list[CudaFacts], Reached]:
    """Look at the nodes, or read what was saved; and save. Raises UsageError, DistdiagError."""
    if files.saved and (files.save or request.cluster.typed()):
        raise UsageError("--from judges saved facts", hint="leave out --save, --python and the hosts")
    if files.saved:
        paths = dict.fromkeys(path.resolve() for path in named_files(files.saved))
        if not paths:
            raise UsageError(f"there are no facts in {', '.join(files.saved)}", hint="name what --save wrote")
        return _apart([_read(path.read_bytes(), str(path)) for path in paths]), Reached()
    if files.save:
        make_folder("--save", files.save)
    with Progress() as progress:
        nodes, reached = look(request, progress)
    for node in nodes if files.save else ():
        write_for_host(files.save, node.host, msgspec.json.encode(Saved(_SCHEMA, node)))
    return nodes, reached


def _apart(nodes: list[CudaFacts]) -> list[CudaFacts]:
    """Give nodes of one name names of their own: files of two days, or of two clusters."""
    count: dict[str, int] = {}
    found = []
    for node in nodes:
        count[node.host] = count.get(node.host, 0) + 1
        number = count[node.host]
        found.append(node if number == 1 else replace(node, host=f"{node.host}#{number}"))
    return found


def _read(data: bytes, name: str) -> CudaFacts:
    try:
        saved = msgspec.json.decode(data, type=Saved)
    except msgspec.DecodeError as error:
        raise UsageError(f"{name} is not what --save wrote: {error}", hint="name files that --save wrote") from error
    if saved.schema != _SCHEMA:
        raise UsageError(f"{name} is of {saved.schema}, not {_SCHEMA}", hint="name files that cuda-env --save wrote")
    try:
        sections_of(saved.node, Goal.ALL)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{name} holds facts that make no sense: {error!r}", hint="save them again") from error
    return saved.node


def exports(report: Report[CudaEnv]) -> list[str]:
    """Write the lines for eval; what they do not mend is said on stderr."""
    mended = {name for name, value in report.data.exports.items() if value or name != "CUDA_VISIBLE_DEVICES"}
    lines = [f"export {name}={report.data.exports[name] or repr('')}" for name in report.data.exports if name in mended]
    left = [
        finding
        for finding in report.findings
        if finding.level in (Level.FAIL, Level.UNKNOWN)
        and not (finding.fix and any(command.startswith(("export", "unset LD")) for command in finding.fix.commands))
    ]
    for finding in left:
        say(f"distdiag: not mended by variables: {finding.id}: {finding.title}")
    if not lines:
        say("distdiag: no variable needs another value")
    return lines
