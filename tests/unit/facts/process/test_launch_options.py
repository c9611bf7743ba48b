"""The rendezvous on a launcher's command line, in the forms that torchrun and accelerate accept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.facts.process import launch_options

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.facts.process.launch_options import Launch

TORCHRUN = ("/venv/bin/python", "/venv/bin/torchrun")


def read(*words: str, **variables: str) -> Launch:
    found = launch_options.read(words, variables)
    assert found is not None
    return found


@each(
    "options, place",
    [
        (("--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400"), ("node1", 29400)),
        (("--rdzv_backend", "c10d", "--rdzv_endpoint", "node1"), ("node1", 29400)),
        (("--rdzv-backend", "c10d", "--rdzv-endpoint", "[fd00::1]:2222"), ("fd00::1", 2222)),
        (("--master-addr", "10.0.0.1", "--master_port=1234"), ("10.0.0.1", 1234)),
        (("--nnodes=1",), ("127.0.0.1", 29500)),
        (("--standalone", "--nproc-per-node=8"), ("", 0)),
    ],
)
def test_where_torchrun_meets(options: tuple[str, ...], place: tuple[str, int]) -> None:
    launch = read(*TORCHRUN, *options, "train.py", "--master-addr", "not-this-one")
    assert (launch.host, launch.port, launch.script) == (*place, "train.py")


def test_options_of_the_launcher_and_their_defaults() -> None:
    launch = read(
        *(
            "/usr/bin/python3",
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2:4",
            "--node_rank",
            "1",
            "--rdzv-id",
            "job7",
        ),
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "n1:1",
            "--rdzv-conf",
            "join_timeout=60,is_host=1",
            "-m",
            "pkg.train",
        ),
    )
    assert (launch.nodes, launch.node_rank, launch.run_id, launch.script) == ((2, 4), 1, "job7", "pkg.train")
    assert (launch.gives_up_s, launch.connects_s, launch.is_host) == (60.0, 60.0, True)


def test_variables_are_the_defaults_of_options() -> None:
    launch = read(
        *TORCHRUN, "--nnodes=3", "train.py", PET_NNODES="2", PET_RDZV_BACKEND="c10d", PET_RDZV_ENDPOINT="n1:5"
    )
    assert (launch.nodes, launch.backend, launch.host, launch.port) == ((3, 3), "c10d", "n1", 5)


def test_accelerate_has_its_own_names() -> None:
    launch = read(
        *("python", "/venv/bin/accelerate", "launch", "--multi_gpu", "--num_machines", "2", "--machine_rank", "1"),
        *("--main_process_ip", "n1", "--main_process_port", "29555", "train.py"),
    )
    assert (launch.program, launch.host, launch.port) == ("accelerate", "n1", 29555)
    assert (launch.nodes, launch.node_rank, launch.script) == ((2, 2), 1, "train.py")


def test_other_launchers_name_no_rendezvous() -> None:
    assert launch_options.read(["srun", "-n", "4", "python", "train.py"], {}) is None


def test_the_line_that_deepspeed_starts_on_a_node_lists_all_nodes() -> None:
    world = "eyJub2RlMSI6IFswLCAxXSwgIm5vZGUyIjogWzAsIDFdfQ=="  # {"node1": [0, 1], "node2": [0, 1]}
    options = (f"--world_info={world}", "--node_rank=1", "--master_addr=node1", "--master_port=29600", "train.py")
    launch = read("/venv/bin/python", "-u", "-m", "deepspeed.launcher.launch", *options)
    assert (launch.program, launch.host, launch.port, launch.node_rank) == ("deepspeed", "node1", 29600, 1)
    assert (launch.hosts, launch.nodes, launch.script) == (("node1", "node2"), (2, 2), "train.py")


@pytest.mark.parametrize("world", ["", "%%", "bnVsbA=="])
def test_a_world_info_that_is_none_lists_no_node(world: str) -> None:
    assert read("python", "-m", "deepspeed.launcher.launch", f"--world_info={world}", "train.py").hosts == ()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mpirun -np 3 --hostfile hosts sh train.sh", ("n1", "n2")),
        ("mpirun --hostfile hosts -np 8 --map-by node train", ()),
        ("/opt/mpi/bin/mpiexec.hydra -n 3 -f bare train", ()),
        ("mpirun -np 2 -H n1,n2:2,n3 train", ("n1", "n2")),
        ("mpirun -np 2 -f none train", ()),
        ("mpirun train", ()),
    ],
)
def test_the_nodes_that_mpirun_fills(line: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nn1 slots=2\nn2:2\nn3 slots = 2\n")
    (tmp_path / "bare").write_text("n1\nn2\n")
    words = line.split()
    assert launch_options.is_mpirun(words)
    assert launch_options.mpi_hosts(words, str(tmp_path)) == expected
