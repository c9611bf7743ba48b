"""`distdiag sync-check FILES`: compare the checksums saved by `distdiag.sync_check(save=...)` on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, StrictOpt  # noqa: TC001 - Typer reads the annotations
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from distdiag.report import Finding, Report
    from distdiag.training.sync_check import Difference, Entry

COMMAND = "sync-check"
_MOST_BYTES = 256 * 2**20
_SHOWN = 10


@record(kw_only=True)
class SyncCheck:
    """Counts of compared values: replicated on all ranks, and sharded."""

    world_size: int
    ranks: tuple[int, ...]
    replicated: int
    sharded: int
    differing: int


def sync_check(
    files: Annotated[list[str], typer.Argument(metavar="DIR|FILES", help="The DIR of save=, or files in it.")],
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Show the first value that differs between ranks, and the ranks that differ.

    In the training script, on every rank: distdiag.sync_check(model, optimizer, step=step, save="DIR").

    Exit status: 0 all ranks hold the same values, 1 they differ, 2 wrong usage, 3 files of ranks are
    missing, 130 interrupted.

    \b
    Examples:
      distdiag sync-check /shared/sync
      distdiag sync-check /shared/sync/rank_0.json /shared/sync/rank_1.json
    """
    from distdiag.output import Output, deliver

    def view(report: Report[SyncCheck]) -> Iterator[str]:
        data = report.data
        values = f"{data.replicated} replicated values, {data.sharded} sharded"
        yield f"{len(data.ranks)} of {data.world_size} ranks: {values}"

    deliver(COMMAND, lambda: _check(files), view, Output(json=as_json, strict=strict))


def _check(files: Sequence[str]) -> Report[SyncCheck]:
    from distdiag.errors import UsageError
    from distdiag.files import named_files

    by_rank: dict[int, Sequence[Entry]] = {}
    found = sorted(named_files(files), key=lambda path: path.stat().st_mtime if path.exists() else 0.0)
    if not found:
        raise UsageError("no files of sync_check", hint='distdiag.sync_check(model, save="DIR") writes them')
    _, world_size, _ = _read(found[-1])
    stale = []
    for path in found:
        rank, size, entries = _read(path)
        if size != world_size:  # a run with fewer ranks overwrites only its own files
            stale.append(f"{path} (of {size} ranks)")
            continue
        if rank in by_rank:
            raise UsageError(f"{path}: rank {rank} is there twice", hint="give the files of one check")
        by_rank[rank] = entries
    return diagnose(by_rank, world_size, stale)


def _read(path: Path) -> tuple[int, int, list[Entry]]:
    import msgspec

    from distdiag.errors import UsageError
    from distdiag.training.sync_check import FORMAT, Saved

    try:
        with path.open("rb") as file:
            document = msgspec.json.decode(file.read(_MOST_BYTES), type=Saved)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="choose a readable file") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not from sync_check: {error}", hint="give the folder of save=") from error
    if document.format != FORMAT:
        raise UsageError(f"{path} has format {document.format[:40]}, expected {FORMAT}", hint="use one version")
    return document.rank, document.world_size, document.entries


def diagnose(by_rank: Mapping[int, Sequence[Entry]], world_size: int, stale: Sequence[str] = ()) -> Report[SyncCheck]:
    """Compare and judge; pure. `stale`: omitted files of an earlier run with another number of ranks."""
    from distdiag.ids import Id
    from distdiag.report import Report
    from distdiag.training.sync_check import compare

    differences = compare(by_rank)
    first = by_rank[min(by_rank)]
    sharded = sum(entry.shard != "" for entry in first)
    data = SyncCheck(
        world_size=world_size,
        ranks=tuple(sorted(by_rank)),
        replicated=len(first) - sharded,
        sharded=sharded,
        differing=len(differences),
    )
    findings = (*_findings(differences, data.ranks, world_size), *_left_out(stale, world_size))
    worst = next((finding for finding in findings if finding.id is not Id.SYNC_CHECK_STALE_FILES), None)
    summary = worst.title if worst else "all ranks hold the same state"
    return Report(command=COMMAND, data=data, findings=findings, summary=summary)


def _left_out(stale: Sequence[str], world_size: int) -> Iterator[Finding]:
    from distdiag.diagnosis.wording import counted
    from distdiag.ids import Id
    from distdiag.report import Finding, Fix, Level

    if stale:
        yield Finding(
            id=Id.SYNC_CHECK_STALE_FILES,
            level=Level.INFO,
            title=f"{counted(len(stale), 'file')} left out: from an earlier run, the newest is of {world_size} ranks",
            evidence=tuple(stale[:_SHOWN]),
            fix=Fix(text="use a new folder for each run"),
        )


def _fix_of(fault: Difference) -> str:
    if fault.kind == "dataloader":
        return (
            "give all ranks the same number of batches: DistributedSampler(..., drop_last=True), or join() of the model"
        )
    if fault.kind == "step":
        return "find where a rank skips or repeats a step: `continue`, `break`, or a checkpoint with another step"
    if fault.kind == "optimizer":
        return "set the hyperparameters and call scheduler.step() on all ranks in the same step; load one checkpoint"
    if fault.kind == "RNG":
        return "seed all ranks alike where they must draw the same numbers"
    if fault.why.startswith("missing"):
        return "build the same model on all ranks: a layer or buffer is made on some of them only"
    return (
        "load one checkpoint on all ranks, then call sync_check earlier to find the step that diverges; if it is the "
        "same rank again, its device may compute wrongly"
    )


def _commands_of(fault: Difference) -> tuple[str, ...]:
    """Return a device test if the values differ without another explanation."""
    from distdiag.options import called_as

    is_value = fault.kind not in ("dataloader", "step", "optimizer", "RNG") and not fault.why.startswith("missing")
    return (f"{called_as()} gpu-test --compute 60s",) if is_value else ()


def _findings(differences: Sequence[Difference], ranks: Sequence[int], world_size: int) -> Iterator[Finding]:
    from distdiag.diagnosis.wording import format_ranks
    from distdiag.ids import Id
    from distdiag.report import Finding, Fix, Level, Where

    faults = [difference for difference in differences if not difference.expected]
    expected = [difference for difference in differences if difference.expected]
    if faults:
        yield Finding(
            id=Id.SYNC_CHECK_OUT_OF_SYNC,
            level=Level.FAIL,
            title=str(faults[0]),
            where=Where(ranks=faults[0].ranks),
            evidence=tuple(map(str, faults[1:_SHOWN])) + ((f"{len(faults)} values differ",) if faults[1:] else ()),
            fix=Fix(text=_fix_of(faults[0]), commands=_commands_of(faults[0])),
        )
    if len(ranks) < world_size:
        yield Finding(
            id=Id.SYNC_CHECK_RANKS_MISSING,
            level=Level.UNKNOWN,
            title=f"files of {world_size - len(ranks)} of {world_size} ranks are missing; given: {format_ranks(ranks)}",
            fix=Fix(text="give the files of all ranks; a rank without one did not reach sync_check(save=...)"),
        )
    if expected:
        yield Finding(
            id=Id.SYNC_CHECK_BATCHNORM_STATISTICS,
            level=Level.INFO,
            title=f"{expected[0].name} differs: each rank keeps BatchNorm statistics of its own batches",
            fix=Fix(text="use torch.nn.SyncBatchNorm if validation on different ranks must agree"),
        )
