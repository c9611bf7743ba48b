"""Has the files read and compared by a process that imports torch, with a deadline: this one never does."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING

from distdiag.commands.floatcmp.diagnose import diagnose
from distdiag.commands.floatcmp.result import Answer, FloatCmp
from distdiag.errors import DistdiagError, UsageError
from distdiag.node import run
from distdiag.node.cuda.driver import how_it_died, told_in

if TYPE_CHECKING:
    from distdiag.commands.floatcmp.model import Request
    from distdiag.deliver import Progress
    from distdiag.report import Report


def check(request: Request, progress: Progress) -> Report[FloatCmp]:
    """Compare two files of tensors.

    Raises:
        UsageError: a file is not there, or no name fits the pattern.
        DistdiagError: a file cannot be read, or the comparison did not come to its end.
    """
    for path in (request.a, request.b, request.reference):
        if path and not os.path.isfile(path) and not os.path.isdir(path):
            kind = "is no file and no folder but a device" if os.path.exists(path) else "there is no such file"
            raise UsageError(f"{path}: {kind}", hint="name files by torch.save, .npy or .safetensors, or checkpoints")
    progress.news(f"comparing {request.a} with {request.b}")
    answer = _ask(request)
    if answer.unreadable:
        raise DistdiagError(answer.unreadable, hint=answer.hint)
    if answer.found is None:
        names = ", ".join(name or "(one tensor without a name)" for name in answer.no_match)
        raise UsageError(f"--key {request.key}: no name is like that", hint=f"there are: {names or 'none'}")
    return diagnose(request, answer.found)


def _ask(request: Request) -> Answer:
    import msgspec

    order = msgspec.json.encode(request).decode()
    with tempfile.TemporaryDirectory(prefix="distdiag-") as folder:
        place = os.path.join(folder, "answer")
        argv = [sys.executable, "-P", "-m", "distdiag.commands.floatcmp.ask_torch", order, place]
        try:
            done = run.run(argv, timeout_s=request.timeout_s)
        except run.CannotRun as error:
            raise DistdiagError(str(error), hint="see whether this Python is still there") from error
        except KeyboardInterrupt:
            run.kill_all()
            raise
        try:
            with open(place, "rb") as file:
                return msgspec.json.decode(file.read(), type=Answer)
        except (OSError, msgspec.DecodeError) as error:
            raise _no_answer(request, done) from error


def _no_answer(request: Request, done: run.Done) -> DistdiagError:
    stages = [one["stage"] for one in told_in(done.stdout) if one["about"] == "stage"]
    at = stages[-1] if stages else "starting Python"
    if done.timed_out:
        return DistdiagError(
            f"no answer in {request.timeout_s:g} s; it was {at}",
            hint="give it more time: " + request.again("--timeout", f"{4 * request.timeout_s:g}"),
        )
    return DistdiagError(
        f"the process that compares ended while {at}: {how_it_died(done)}",
        hint="if it was killed, memory may have run out: compare fewer tensors with --key",
    )
