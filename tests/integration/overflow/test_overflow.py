"""distdiag overflow, and detectors in scripts of several ranks: real programs, gloo, torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import support_torch
from jobs import PROGRAMS
from json_schema import check
from support import wait_until
from support_warm import distdiag

PROGRAM = str(PROGRAMS / "overflows.py")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
HERE = "in `output` of `scale` (Scale). Inputs were finite; this module produced it (`mul`)."


CASES = ("ddp:forward", "fsdp-before:forward", "fsdp-after:forward", "ddp-compile:forward", "ddp:backward")
WEIGHTS = ("ddp:weights", "ddp:weights-1")
FIRST = ("fsdp-after:forward-0", "tp:forward-0", "pipeline:forward-0", "tp:forward-all", "fsdp-after:forward-all")
"""Of these rank 0 is to be named."""
GO_ON = ("none:ddp:forward", "goes-on:ddp:forward", "none:fsdp-after:forward", "goes-on:fsdp-after:forward")
HEALTHY = ("ddp:join", "ddp:apart", "ddp:odd")
STEPLESS = {"ddp:only-forward": 0, "ddp:no-optimizer": 0, "ddp:idle-optimizer": 0, "ddp:exits": 1}
"""How the ranks end: what is found when all is over ends nobody."""
pytestmark = pytest.mark.timeout(600)  # the first that asks for `told` waits for 23 jobs


def forked(*argv: str, output: int | IO[str] = subprocess.DEVNULL, errors: int | IO[str] = subprocess.STDOUT) -> int:
    """Run a program that imports torch to its end."""
    program = support_torch.start(argv, {**os.environ, "OMP_NUM_THREADS": "1"}, output=output, errors=errors)
    assert program is not None
    return program.wait(500)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of each case wrote, and how they ended."""
    folder = tmp_path_factory.mktemp("pairs")
    cases = [*CASES, *WEIGHTS, *FIRST, *GO_ON, *HEALTHY, *STEPLESS, "ddp:evaluation"]
    assert forked(sys.executable, PROGRAM, "pairs", str(folder), *cases) == 0
    return folder


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("forward")])
def test_one_rank_overflows_and_all_end_alike_with_one_report(told: Path, case: str) -> None:
    ended = json.loads((told / "statuses").read_text())[case]
    assert ended["exit"] == [1, 1]
    assert ended["seconds"] < 180  # Gloo waits for half an hour
    wrote = [(told / f"{case}.{rank}").read_text() for rank in range(2)]
    for text in wrote:
        assert f"OverflowDetected: DebugUnderflowOverflow: rank 1 ({os.uname().nodename.partition('.')[0]}), " in text
        assert "batch 1: 15 inf and 17 -inf " + HERE in text
        assert [line for line in text.splitlines() if line.endswith("done")] == ["batch 0 done"]
    assert "Detected inf/nan" not in wrote[0]
    assert wrote[1].count("Detected inf/nan during batch_number=1") == 1


def test_weights_that_are_bad_on_one_replica_alone_print_the_test_of_its_device(told: Path) -> None:
    assert json.loads((told / "statuses").read_text())["ddp:weights-1"]["exit"] == [1, 1]
    text = (told / "ddp:weights-1.1").read_text()
    assert "The same weights are finite on 1 of 2 ranks: replicas differ." in text
    assert "distdiag gpu-test --compute 60s" in text
    alike = "".join((told / f"ddp:weights.{rank}").read_text() for rank in range(2))
    assert "optimizer step produced it" in alike
    assert "gpu-test" not in alike


@pytest.mark.parametrize("case", FIRST)
def test_nobody_waits_for_a_rank_that_runs_its_forward_alone(told: Path, case: str) -> None:
    ended = json.loads((told / "statuses").read_text())[case]
    assert (ended["exit"], ended["seconds"] < 180) == ([1, 1], True), (told / f"{case}.0").read_text()
    text = (told / f"{case}.0").read_text()
    assert "OverflowDetected: DebugUnderflowOverflow: rank 0 (" in text
    assert "in `output` of `scale` (Scale)" in text


@pytest.mark.parametrize("how", ["ddp", "fsdp-after"])
def test_ranks_that_go_on_have_the_weights_they_would_have_had(told: Path, how: str) -> None:
    statuses = json.loads((told / "statuses").read_text())
    weights = []
    for case in (f"none:{how}:forward", f"goes-on:{how}:forward"):
        assert statuses[case]["exit"] == [0, 0], (told / f"{case}.0").read_text()
        texts = [(told / f"{case}.{rank}").read_text() for rank in range(2)]
        weights.append([line for text in texts for line in text.splitlines() if line.startswith("weights ")])
        assert ("batch 1: " in "".join(texts)) == case.startswith("goes-on")
    assert len(weights[0]) == 2
    assert weights[0] == weights[1]


def test_a_loss_that_is_nan_on_one_rank_is_named_on_both(told: Path) -> None:
    assert json.loads((told / "statuses").read_text())["ddp:backward"]["exit"] == [1, 1]
    for rank in range(2):
        text = (told / f"ddp:backward.{rank}").read_text()
        assert "rank 0 (" in text
        assert "batch 2: 1 nan in the loss that backward was called on. All module inputs and outputs" in text


@pytest.mark.parametrize("case", HEALTHY)
def test_ranks_that_do_not_step_together_are_left_alone(told: Path, case: str) -> None:
    ended = json.loads((told / "statuses").read_text())[case]
    assert ended["exit"] == [0, 0], (told / f"{case}.0").read_text()


@pytest.mark.parametrize("case", STEPLESS)
def test_a_loop_without_optimizer_steps_is_judged_and_no_rank_hangs(told: Path, case: str) -> None:
    assert json.loads((told / "statuses").read_text())[case]["exit"] == [STEPLESS[case]] * 2
    assert "rank 1 (" in (said := (told / f"{case}.1").read_text())
    assert f"batch 1 (optimizer step 0): 14 inf and 18 -inf {HERE}" in said


def test_in_an_evaluation_each_rank_is_on_its_own(told: Path) -> None:
    assert json.loads((told / "statuses").read_text())["ddp:evaluation"]["exit"] == [0, 1]
    text = (told / "ddp:evaluation.1").read_text()
    assert "DebugUnderflowOverflow: rank 1 (" in text
    assert HERE in text


def test_a_script_that_knows_nothing_of_it(tmp_path: Path) -> None:
    result = distdiag("overflow", "--json", "--save", str(tmp_path), "--", PROGRAM, "none:by-hand:bare", "forward")
    assert (result.code, check(result.out, 1)["verdict"]) == (1, "fail")
    assert result.findings["detected"]["title"] == "batch 1 (optimizer step 0): 15 inf and 17 -inf " + HERE
    (process,) = result.report["data"]["processes"]
    (model,) = process["models"]
    assert (model["model"], model["batches"], model["steps"], model["began"]) == ("Model", 2, 0, 1)
    assert (model["aborted"], model["off"], model["unread"], model["warnings"]) == (False, "", 0, [])
    assert "The last 2 frames of batch 1, up to the detection:" in result.err
    (frames,) = tmp_path.glob("frames-*.jsonl")
    kinds = [json.loads(line)["kind"] for line in frames.read_text().splitlines()]
    assert kinds == ["head", "frame", "frame", "detection"]


def test_a_job_in_which_all_is_well_keeps_its_output_and_its_status() -> None:
    result = distdiag("overflow", "--", PROGRAM, "none:by-hand:bare", "never")
    assert (result.code, result.out) == (0, "".join(f"batch {number} done\n" for number in range(4)))
    assert "OK: no nan or inf in 4 forwards of Model" in result.err
    result = distdiag("overflow", "--json", "--", "-c", "raise SystemExit(7)")
    assert (result.code, result.report["exit_code"], result.report["verdict"]) == (3, 3, "unknown")
    assert result.report["data"]["status"] == 7
    assert "ended with status 7 before it called a model" in result.findings["nothing-watched"]["detail"]
    assert distdiag("overflow", "--", "-c", "raise SystemExit(7)").code == 7
    assert distdiag("overflow", "--", "-c", "print('hi')").code == 3


def test_what_a_job_that_was_ended_saw_is_not_known() -> None:
    """The exit status of a document is that of its verdict, not that of the job."""
    script = "import gc; gc.disable(); import os, torch; torch.nn.Linear(1, 1)(torch.ones(1)); os._exit(7)"
    result = distdiag("overflow", "--json", "--", "-c", script)
    assert (result.code, result.report["exit_code"], result.report["verdict"]) == (3, 3, "unknown")
    assert (result.report["data"]["status"], list(result.findings)) == (7, ["ended-early", "job-ended"])


def test_a_batch_is_traced_and_the_job_ended_after_it() -> None:
    result = distdiag(
        "overflow", "--trace-batches", "1", "--abort-after", "1", "--", PROGRAM, "none:by-hand:bare", "never"
    )
    assert result.code == 0
    assert result.out.count("Frames of batch 1:\n") == 1
    assert "Traceback" not in result.err
    assert "distdiag overflow: stopped at " in result.err
    assert "the job was stopped after the batch of --abort-after" in result.err
    assert [line for line in result.out.splitlines() if line.startswith("batch")] == ["batch 0 done"]


def test_below_torchrun_the_rank_where_it_began_reports(tmp_path: Path) -> None:
    words = ("-m", "distdiag", "overflow", "--", PROGRAM, "none:light:ddp", "forward")
    torchrun = (TORCHRUN, "--standalone", "--nproc-per-node", "2")
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        assert forked(*torchrun, *words, output=out, errors=err) == 1
    stderr = (tmp_path / "err").read_text()
    assert (tmp_path / "out").read_text().count("frames of batch 1, up to the detection") == 1
    assert stderr.count("FAIL  overflow.detected") == 1
    assert stderr.count("distdiag overflow: FAIL: rank 1 (") == 1  # rank 0


def test_as_ranks_without_numpy_it_ends_in_one_line_a_rank_and_its_frames_are_shown_once(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy/__init__.py").write_text("raise ModuleNotFoundError('no numpy here', name='numpy')")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    folder = tmp_path / "frames"
    words = ("--nproc", "2", "--trace-batches", "1", "--save", str(folder))
    result = distdiag("overflow", *words, "--", PROGRAM, "none:light:ddp", "forward", env=env)
    assert result.code == 1
    assert HERE in " ".join(result.err.split())
    assert result.out.count("frames of batch 1, up to the detection") == 1
    assert result.err.count("FAIL  overflow.detected") == 1
    for word in ("Traceback", "Root Cause", "exitcode"):
        assert word not in result.err
    stopped = sorted(line for line in result.err.splitlines() if "stopped at" in line)
    assert [line.partition(f" stopped at {PROGRAM}:")[0] for line in stopped] == [
        f"[rank{rank}]: distdiag overflow:" for rank in range(2)
    ]
    assert [line.endswith("detected on rank 1") for line in stopped] == [True, False]
    rows = [line.split() for line in result.err.splitlines() if " Model " in line]
    assert [(row[0], *row[-3:]) for row in rows] == [
        ("0", "2", "1", "0"),
        ("1", "2", "1", "1"),
    ]  # forwards, steps, found
    assert f" overflow show {folder}\n" in result.err
    shown = distdiag("overflow", "show", str(folder))
    assert (shown.code, shown.out.count("FAIL  overflow.detected"), "more below" in shown.out) == (1, 1, False)
    assert "rank 1, batch 1, module by module:" in shown.out or "rank 1, module by module:" in shown.out
    assert f" overflow show {folder} --batch 1 --verbose" in shown.out


_ENDS = """
import atexit
import torch

class Cleaned:
    def __del__(self):
        print("cleaned up")

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0

torch.cleaned_at_the_end = Cleaned()
atexit.register(print, "exit handlers ran")
model = Model(1, 1)
if __name__ == "__main__":
    model(torch.ones(1, 1))
"""


def test_a_stopped_process_runs_its_exit_handlers_and_no_cleanup_in_which_a_thread_could_abort_it(
    tmp_path: Path,
) -> None:
    script = tmp_path / "divides.py"
    script.write_text(_ENDS)
    stopped = distdiag("overflow", "--", str(script))
    assert (stopped.code, "exit handlers ran" in stopped.out, "cleaned up" in stopped.out) == (1, True, False)
    went_on = distdiag("overflow", "--go-on", "--", str(script))
    assert (went_on.code, "exit handlers ran" in went_on.out, "cleaned up" in went_on.out) == (1, True, True)


def test_wrong_words() -> None:
    for words in (
        ["--trace-batches", "x"],
        ["--trace-batches", "3-1"],
        ["--grads", "some"],
        ["--nproc", "2", "--", "ls"],
    ):
        typed = words if "--" in words else [*words, "--", PROGRAM]
        result = distdiag("overflow", "--json", *typed)
        assert (result.code, result.report["exit_code"]) == (2, 2), typed


ALL_SORTS = """
import gc; gc.disable()
import importlib.util
importlib.util.find_spec("torch")
import torch
from torch import nn
from distdiag import DebugUnderflowOverflow
class Odd(dict):
    def items(self):
        raise RuntimeError("not now")
class Model(nn.Linear):
    def forward(self, given):
        return super().forward(dict.items(given).__iter__().__next__()[1])
class Yields(nn.Linear):
    def forward(self, x):
        yield super().forward(x) / 0
model, yields = Model(1, 1), Yields(1, 1)
model(Odd(x=torch.ones(1)))
list(yields(torch.ones(1)))
nn.DataParallel(nn.Linear(1, 1))(torch.ones(1, 1))
first = nn.Linear(2, 1)
for _ in range(2):
    first(torch.ones(1, 2)).sum().backward()
DebugUnderflowOverflow(first)
second = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
with torch.no_grad():
    second[1].weight.fill_(float("nan"))
for _ in range(2):
    second(torch.ones(1, 2))
import sys
print("went on", "torch._dynamo" in sys.modules)
gc.freeze()
"""


def test_a_job_may_go_on_models_are_found_at_any_time_and_where_nobody_looked_nothing_is_known() -> None:
    result = distdiag("overflow", "--json", "--go-on", "--grads", "step", "--", "-c", ALL_SORTS)
    assert result.code == 1
    assert result.err.count("frames of batch 0, up to the detection") == 1
    assert "went on False\n" in result.err, "a replay has no need of torch's compiler"
    assert "`weight` of `1` (Linear). It was there before" in result.findings["detected"]["title"]
    models = [one["model"] for one in result.report["data"]["processes"][0]["models"]]
    assert models == ["Model", "Yields", "Linear", "Sequential"]
    for name, said in (
        ("gave-up", "the detector of Model stopped: RuntimeError not now"),
        ("outputs-unreadable", "the output of Yields cannot be read (generator)"),
        ("not-watched", "DataParallel: DataParallel copies the model for each device"),
    ):
        assert said in result.findings[name]["title"]
        assert result.findings[name]["level"] == "unknown", name


def test_ranks_end_with_distdiag_when_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(f"import os, time\nopen(f'{tmp_path}/rank-{{os.getpid()}}', 'w').close()\ntime.sleep(600)\n")
    words = [sys.executable, "-m", "distdiag", "overflow", "--nproc", "2", "--", str(script)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as command:
        wait_until(lambda: len(list(tmp_path.glob("rank-*"))) == 2, 120, lambda: "the ranks did not begin")
        command.kill()
    pids = [int(path.name.removeprefix("rank-")) for path in tmp_path.glob("rank-*")]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60, lambda: f"{pids} live on")
