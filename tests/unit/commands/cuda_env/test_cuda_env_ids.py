"""cuda-env: facts in, finding ids out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from loops import each

from distdiag.cluster.targets import Cluster
from distdiag.commands.cuda_env.collect import CudaFacts
from distdiag.commands.cuda_env.diagnose import diagnose
from distdiag.commands.cuda_env.explain import judge
from distdiag.commands.cuda_env.types import Goal, Request
from distdiag.facts.cuda.building import Building
from distdiag.facts.cuda.compilers import Compilers
from distdiag.facts.cuda.driver import Driver
from distdiag.facts.cuda.environment import Interpreter
from distdiag.facts.cuda.toolkits import Toolkit, Use
from distdiag.facts.cuda.torchfiles import DeepSpeed, Torch
from distdiag.knowledge.known_lines import known_builds
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from distdiag.report import Report

GIB = 1 << 30
ROOT = "/usr/local/cuda-12.4"
USE = Use(ROOT, f"{ROOT}/bin/nvcc", "CUDA_HOME")
TOOLKIT = Toolkit(
    root=ROOT,
    real=ROOT,
    found_by=("CUDA_HOME",),
    version="12.4",
    sources=((f"{ROOT}/version.json", "12.4.1"),),
    exists=True,
    nvcc=f"{ROOT}/bin/nvcc",
    headers=f"{ROOT}/include",
    libraries=f"{ROOT}/lib64",
    runtime="libcudart.so.12",
    dev_link=True,
    limit=None,
)
BUILDING = Building(
    ninja="/usr/bin/ninja",
    python_header="/usr/include/python3.11/Python.h",
    aio_header="/usr/include/libaio.h",
    aio_library="/usr/lib/libaio.so",
    processors=8,
    memory_available_bytes=64 * GIB,
    shm_total_bytes=32 * GIB,
    caches=(),
    origins=(),
    package_tool="apt-get",
    nvidia_repository=False,
    root=False,
    uv="",
)
TORCH = Torch("/venv/torch", "2.9.1+cu124", "12.4", "", "/venv/torch/version.py", 0.0)
FACTS = CudaFacts(
    host="node1",
    goal="all",
    machine="x86_64",
    variables={"CUDA_HOME": ROOT},
    python=Interpreter("/venv/bin/python", "3.11.2", "/venv", include="/usr/include/python3.11", pip=True),
    packages={},
    torch=TORCH,
    imported=None,
    deepspeed=None,
    driver=Driver("550.90", "", "", "", 0, 0, "", False, (), ""),
    toolkits=(TOOLKIT,),
    nvccs=(),
    uses={"torch": USE, "cmake": USE, "nvcc": USE},
    compilers=Compilers((), "c++", None),
    loader_path=(),
    wheels=(),
    conflicts=(),
    extensions=(),
    extensions_complete=True,
    building=BUILDING,
)
DEEPSPEED = DeepSpeed("0.19.8", "/venv/deepspeed", "", "", (), {"12": ("12.1", "12.2")})


def ids(report: Report[Any]) -> set[str]:
    return {str(finding.id) for finding in report.findings}


@pytest.mark.parametrize(
    ("id_", "changes"),
    [
        ("cuda-env.build.libaio", {"deepspeed": DEEPSPEED, "building": replace(BUILDING, aio_header="")}),
        ("cuda-env.build.python-h", {"building": replace(BUILDING, python_header="")}),
        ("cuda-env.sys.shm", {"building": replace(BUILDING, shm_total_bytes=64 << 20)}),
        ("cuda-env.deepspeed.cuda-minor", {"deepspeed": DEEPSPEED, "torch": replace(TORCH, cuda="12.1")}),
    ],
)
def test_a_fact_gives_its_finding(id_: str, changes: dict[str, Any]) -> None:
    request = Request(cluster=Cluster(), goal=Goal.ALL)
    assert id_ not in ids(diagnose(request, Gathered(facts=[FACTS])))
    assert id_ in ids(diagnose(request, Gathered(facts=[replace(FACTS, **changes)])))


@each(
    "id_, text, unread, gpus",
    [
        ("cuda-env.log.clean", "step 1 done\n", "", ()),
        ("cuda-env.log.unknown", "mylib: it cannot go on\n", "", ()),
        ("cuda-env.log.success", "error: no such option -x\nSuccessfully installed mylib-1.0\n", "", ()),
        ("cuda-env.log.cut", "step 1 done\n", "100 MiB in the middle were not read", ()),
        ("cuda-env.log.gpu", "step 1 done\n", "", ("9.0",)),
        ("cuda-env.log.elsewhere", "File C:\\build\\setup.py: it cannot go on\n", "", ()),
    ],
)
def test_a_log_gives_its_finding(id_: str, text: str, unread: str, gpus: tuple[str, ...]) -> None:
    assert id_ in ids(judge(Request(cluster=Cluster(), gpus=gpus), (text, unread), Gathered(facts=[FACTS])))


def test_a_node_without_an_answer_has_its_id() -> None:
    request = Request(cluster=Cluster(), goal=Goal.ALL)
    assert "cuda-env.no-answer" in ids(diagnose(request, Gathered(facts=[FACTS], missing={"node2": "timed out"})))


def test_each_recorded_log_gives_the_ids_of_its_lines() -> None:
    known = set[str]()
    for path in sorted((Path(__file__).parents[3] / "recorded" / "cuda_logs").glob("*.txt")):
        _, names, text = path.read_text("utf-8").split("\n", 2)
        expected = {f"cuda-env.log.{name}" for name in names.removeprefix("# ").split() if name != "nothing"}
        found = ids(judge(Request(cluster=Cluster()), (text, ""), Gathered(facts=[FACTS])))
        assert expected <= found, path.name
        known |= expected
    assert known == {f"cuda-env.log.{name}" for name in known_builds()}
