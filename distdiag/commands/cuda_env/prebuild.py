"""Commands that prebuild DeepSpeed: for this machine, and as one wheel for all nodes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.about.archlist import recommended
from distdiag.commands.cuda_env.about.building import jobs, libaio
from distdiag.commands.cuda_env.archs import as_list
from distdiag.commands.cuda_env.check import SUBCOMMAND, prepared
from distdiag.commands.cuda_env.sections import sections_of
from distdiag.commands.cuda_env.types import Goal
from distdiag.errors import DistdiagError, UsageError
from distdiag.knowledge.cuda import tables
from distdiag.output import say
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.commands.cuda_env.types import Request

USUAL = ("cpu_adam", "fused_adam", "utils")
_LATER = ("build.jobs", "build.cache-stale", "build.libaio")
"""Handled by the commands themselves."""


def build_commands(request: Request, options: runner.Options, ops: str) -> list[str]:
    """Collect, and return the commands that build DeepSpeed. Raises UsageError, DistdiagError."""
    wanted = read_ops(ops)
    request, gathered = runner.facts_of(SUBCOMMAND, request, options)
    if not gathered.facts:
        raise DistdiagError("no node returned facts", hint="find out why: run distdiag cuda-env with the same hosts")
    for host, refusal in gathered.refusals.items():
        say(f"distdiag: {host} was not reached; its GPUs are not in the list: {refusal.message}")
    return commands(prepared(request, gathered).facts, wanted)


def read_ops(text: str) -> tuple[str, ...]:
    """Parse --ops: names separated by commas, "all", or empty for the usual ones. Raises UsageError."""
    words = [word.strip().lower().removeprefix("ds_build_") for word in text.split(",") if word.strip()]
    known = tables().deepspeed.ops
    wrong = [word for word in words if word not in known and word != "all"]
    if wrong:
        raise UsageError(f"--ops: DeepSpeed has no op {wrong[0]!r}", hint="all, or any of: " + ", ".join(known))
    return () if words == ["all"] else tuple(words) or USUAL


def commands(nodes: Sequence[CudaFacts], ops: Sequence[str]) -> list[str]:
    """Format the commands, with comments, after the fixes they depend on."""
    here = nodes[0]
    gpus = sorted({arch for facts in nodes for arch in fixes.gpu_archs(facts)})
    archs = as_list(gpus) or recommended(here)
    problems = [found for section in sections_of(here, Goal.BUILD) for found in section.problems]
    lines: list[str] = []
    for found in problems:
        about = found.id.startswith(("torch.", "toolkit.", "cc.", "build.")) and found.id not in _LATER
        if about and found.level in (Level.FAIL, Level.WARN):
            lines += [f"# first: {found.title}", *found.to_paste]
    missing = libaio(here) if not ops or {"aio", "gds"} & set(ops) else None
    lines += [f"# first: {missing.title}", *missing.to_paste] if missing is not None else []
    switches = " ".join(f"DS_BUILD_{op.upper()}=1" for op in ops) if ops else "DS_BUILD_OPS=1"
    setting = f'TORCH_CUDA_ARCH_LIST="{archs}" ' if archs else ""
    start = f"{setting}{switches} MAX_JOBS={jobs(here)}"
    skip = "DS_SKIP_CUDA_CHECK=1 " if any(found.id.startswith("deepspeed.cuda") for found in problems) else ""
    version = here.deepspeed.version.partition("+")[0] if here.deepspeed is not None else tables().deepspeed.version
    pip, python = fixes.pip(here), fixes.python(here)
    wheel = f"{python} -m pip wheel"
    of = "these GPUs" if gpus else "everything torch supports (no GPU found here)"
    if here.meant or len(nodes) > 1:
        of = "the GPUs given by --gpu" if here.meant else f"all GPUs of {len(nodes)} nodes"
    flags = "--no-build-isolation --no-cache-dir --no-binary deepspeed -v"
    needs = [*tables().deepspeed.needs, *(() if here.python.pip else ("pip",))]
    log = "2>&1 | tee build.log"
    return [
        *lines,
        "# DeepSpeed's requirements besides torch",
        f"{pip} {shlex.join(needs)}",
        f"# into this environment, for {of}; the output also goes to build.log",
        f"{skip}{start} {pip} {fixes.reinstall(here)} --no-deps {flags} deepspeed=={version} {log}",
        f"{python} -c 'import deepspeed; print(deepspeed.__version__)'",
        "# or build one wheel for all nodes with the same torch, Python and CUDA, and install "
        "dist/deepspeed-*.whl there",
        f"{skip}{start} {wheel} {flags} --no-deps -w dist deepspeed=={version} {log}",
        "# if it fails: " + "distdiag cuda-env --explain build.log",
    ]
