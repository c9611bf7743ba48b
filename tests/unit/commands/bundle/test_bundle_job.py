"""bundle: which job goes into the file, which processes of it, and how its verdicts are listed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from pyspy_facts import node, process

from distdiag.cluster.targets import Cluster
from distdiag.commands.bundle.collect_all import _ask
from distdiag.commands.bundle.compose import in_order, verdict_in_words
from distdiag.commands.bundle.diagnose import diagnose
from distdiag.commands.bundle.find_job import in_words, taken_job
from distdiag.commands.bundle.types import Bundle, OnHost, Request, TakenJob, Verdict
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from distdiag.jobs.collect import Process, Processes

REQUEST = Request(program="distdiag", cluster=Cluster(), target="x.tar.gz")
NOTEBOOK = process(900, above=(1,), parent=1, command="python notebook.py", job={})


def rank(pid: int, number: int, run_id: str, port: str, **more: object) -> Process:
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run_id, "SLURM_JOB_ID": port}
    launcher = pid // 100 * 100
    return process(pid, number, 2, parent=launcher, above=(launcher, 1), job=job, **more)  # type: ignore[arg-type]


def launcher(pid: int) -> Process:
    return process(pid, kind="launcher", comm="pt_elastic", torch=False, parent=1, above=(1,), job={})


def host(*processes: Process) -> Processes:
    return node(processes, {}).processes


JOB_A = (launcher(100), rank(101, 0, "A", "4001"), rank(102, 1, "A", "4001"))
JOB_B = (launcher(200), rank(201, 0, "B", "4002"))


def test_the_only_job_with_ranks_is_taken_and_no_other_process() -> None:
    everything = host(*JOB_A, NOTEBOOK)
    job = taken_job(REQUEST, [everything])
    assert job == TakenJob(
        name="A",
        title="job A at localhost:4001 (torchrun): 2 of 2 ranks",
        processes=(OnHost(host="n1", ranks=(101, 102), launchers=(100,)),),
        has_gpu=False,
    )
    assert in_words(job.processes[0]) == "pids 101, 102; launcher 100"
    for request in (REQUEST, replace(REQUEST, job=job.name)):
        asked = _ask(request, everything)
        assert (asked.ranks, asked.launchers) == ([(101, 0), (102, 1)], [100])


def test_a_process_without_a_rank_is_no_job() -> None:
    assert taken_job(REQUEST, [host(NOTEBOOK)]) is None
    assert _ask(REQUEST, host(NOTEBOOK)).ranks == []


def test_of_several_jobs_none_is_taken_unless_it_is_named() -> None:
    everything = host(*JOB_A, *JOB_B, NOTEBOOK)
    with pytest.raises(
        UsageError, match=r"2 jobs are running; a bundle covers a single job: job A at .* on n1; job B"
    ) as raised:
        taken_job(REQUEST, [everything])
    assert raised.value.hint == "name one: --job A or --job B"
    for request in (replace(REQUEST, job="B"), replace(REQUEST, cluster=Cluster(slurm_job="4002"))):
        job = taken_job(request, [everything])
        assert job is not None
        assert (job.name, job.processes[0].ranks) == ("B", (201,))
    assert taken_job(replace(REQUEST, job="C"), [everything]) is None


def test_ranks_that_look_for_each_other_in_different_places_are_one_job() -> None:
    strayed = host(launcher(100), rank(101, 0, "none", "4001"), launcher(200), rank(201, 1, "none", "4002"))
    job = taken_job(REQUEST, [strayed])
    assert job is not None
    assert (job.name, job.processes[0].ranks) == ("", (101, 201))
    assert [pid for pid, _ in _ask(REQUEST, strayed).ranks] == [101, 201]


@pytest.mark.parametrize(
    ("gpu", "last"), [(False, "cuda-env: fail, but no rank has a GPU open: no CUDA"), (True, "doctor: OK: fit")]
)
def test_verdicts_are_listed_the_worst_first_and_those_of_gpus_last_where_none_is_open(gpu: bool, last: str) -> None:
    job = taken_job(REQUEST, [host(launcher(100), rank(101, 0, "A", "4001", gpu=gpu))])
    verdicts = [
        Verdict(command="doctor", verdict="ok", summary="fit", same=True),
        Verdict(command="cuda-env", verdict="fail", summary="no CUDA", same=True),
        Verdict(command="pyspy-all", verdict="warn", summary="rank 1 is slower", same=True),
    ]
    listed = [verdict_in_words(verdict) for verdict in in_order(verdicts, job)]
    assert listed[0] == ("cuda-env: FAIL: no CUDA" if gpu else "pyspy-all: WARN: rank 1 is slower")
    assert listed[-1] == last


def test_each_gap_of_a_bundle_has_its_id() -> None:
    verdict = Verdict(command="hang", verdict="fail", summary="rank 1 is stopped", same=False)
    made = Bundle(
        file="x.tar.gz",
        bytes=1,
        map_file="x.tar.gz.map.json",
        hosts=("n1",),
        missing=("n1",),
        verdicts=(verdict,),
        job=None,
        members=(),
        cut=("of the ends of 2 logs, 50% is kept: --max-size",),
        secrets=0,
        replaced={},
        stand_ins=0,
    )
    report = diagnose(REQUEST, made, {"n1": "n1 did not answer"}, ["doctor: no python3"])
    assert [(one.id, str(one.level)) for one in report.findings] == [
        ("bundle.incomplete", "warn"),
        ("bundle.no-facts", "warn"),
        ("bundle.empty", "unknown"),
        ("bundle.cut", "warn"),
        ("bundle.verdict-differs", "warn"),
    ]
