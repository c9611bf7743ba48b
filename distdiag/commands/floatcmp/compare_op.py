"""A program of its own, `python -m`: computes an operation in two ways with torch, and writes an OpAnswer to a file."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from distdiag.facts import programs
from distdiag.training.floatcmp.operation_result import OpComparison, Side  # noqa: TC001 - msgspec reads these

ANSWER = "answer"


@dataclass(frozen=True, kw_only=True)
class OpRequest:
    """What was typed."""

    program: str = "distdiag"
    operation: str
    size: int
    sides: tuple[Side, Side]
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class OpAnswer:
    """What the process that has torch writes: one of `found` and `refused` is set."""

    found: OpComparison | None = None
    refused: str = ""
    hint: str = ""


def main(order: str, folder: str) -> None:
    """Do what the order, an OpRequest in JSON, asks for."""
    import msgspec

    answer = _answer(msgspec.json.decode(order, type=OpRequest))
    with open(os.path.join(folder, ANSWER), "wb") as file:
        file.write(msgspec.json.encode(answer))


def _answer(request: OpRequest) -> OpAnswer:
    if any(side.deterministic for side in request.sides):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    env = f"{request.program} cuda-env"
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return OpAnswer(refused=f"torch cannot be imported: {type(error).__name__}: {error}"[:400], hint=env)
    for side in request.sides:
        if side.device.startswith("cuda") and not torch.cuda.is_available():
            return OpAnswer(
                refused=f"{side.typed}: this machine has no GPU that torch can use (torch {torch.__version__})",
                hint=f"run it on a machine with a GPU; or find out why: {env}",
            )
    from distdiag.training.floatcmp.operations import compare_operation

    try:
        return OpAnswer(found=compare_operation(request.operation, request.size, request.sides))
    except RuntimeError as error:  # no such device, out of memory, not implemented for the dtype, not deterministic
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return OpAnswer(refused=f"torch cannot compute {request.operation}: {text[:400]}", hint="choose another side")


if __name__ == "__main__":
    programs.die_with_parent()
    main(sys.argv[1], sys.argv[2])
