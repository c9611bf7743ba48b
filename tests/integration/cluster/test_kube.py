"""Pods as hosts, with a real kubectl: the answers of commands, a row for each pod, and Kubernetes' own knowledge."""

from __future__ import annotations

import datetime
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Network, need_network
from jobs import PROGRAMS, outliers, wait_still
from kube_api import FakePod, KubeApi, need_kubectl, pod_manifest
from support import need, wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from support import Result

SOON = ("--interval", "0.3")
LABELS = {"job-name": "train", "training.kubeflow.org/job-name": "train"}
LOST = """[rank2]: Traceback (most recent call last):
[rank2]:   File "/app/train.py", line 80, in step
[rank2]:     x = torch.zeros(10**12)
[rank2]: MemoryError: cannot allocate
"""
pytestmark = pytest.mark.timeout(240)


def stamp(ago_s: float) -> str:
    at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago_s)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def oom_killed(ago_s: float, started_ago_s: float) -> dict[str, Any]:
    """A container that was OOM-killed and started anew, as the kubelet reports it."""
    ended = {"reason": "OOMKilled", "exitCode": 137, "startedAt": stamp(90_000), "finishedAt": stamp(ago_s)}
    running = {"running": {"startedAt": stamp(started_ago_s)}}
    return {"pytorch": {"state": running, "restartCount": 1, "lastState": {"terminated": ended}}}


def since(ago_s: float) -> dict[str, Any]:
    return {"pytorch": {"state": {"running": {"startedAt": stamp(ago_s)}}}}


def named(name: str) -> list[str]:
    """Words that enter a container of its own host name on this machine, with a view of no foreign process."""
    words = f'mount -t proc proc /proc; hostname {name}; exec "$@"'
    return ["unshare", "-mpuf", "--kill-child", "sh", "-c", words, "sh"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, KubeApi]]:
    """Three pods with a rank each, of which rank 2 hangs; train-1 alone was OOM-killed, two minutes ago."""
    need_network()
    need_kubectl()
    folder = tmp_path_factory.mktemp("kube")
    with Network([f"train-{rank}" for rank in range(3)]) as network:
        for rank, node in enumerate(network.nodes):
            place = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
            env = {**place, **meeting, "JOB_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
            node.start(sys.executable, str(PROGRAMS / "hangs_in_load_batch.py"), env=env)

        def pod(rank: int) -> FakePod:
            statuses = oom_killed(120, 115) if rank == 1 else since(3600)
            limits: list[dict[str, Any]] = [
                {"name": "pytorch", "resources": {"limits": {"memory": "64Gi"}}},
                {"name": "istio-proxy"},
            ]
            manifest = pod_manifest(
                f"train-{rank}", labels=LABELS, containers=limits, node=f"gpu0{rank}", statuses=statuses
            )
            logs = {("pytorch", False): f"rank {rank}: step 1\nrank {rank}: step 2\n", ("pytorch", True): LOST}
            return FakePod(manifest, enter=network.nodes[rank].command(), logs=logs)

        def missing() -> set[str]:
            return {f"ready-{rank}" for rank in range(3)} - {path.name for path in folder.glob("ready-*")}

        wait_until(lambda: not missing(), 90, lambda: f"not ready: {missing()}")
        wait_still(folder)
        with KubeApi(folder, [pod(rank) for rank in range(3)]) as api:
            yield network, api


def test_pods_of_a_job_show_the_outlier_and_its_node(job: tuple[Network, KubeApi]) -> None:
    _, api = job
    before = len(api.requests)
    result = distdiag("pyspy-all", "--json", "--kube", "pytorchjob/train", *SOON, env=api.env)
    assert {line.split()[0] for line in api.requests[before:]} == {"GET"}, "nothing is changed"
    assert (result.code, outliers(result)) == (1, [([2], "load_batch")]), result.out + result.err
    finding = result.findings["not-in-collective"]
    assert finding["where"]["hosts"] == ["train-2"]
    assert "train-2 is on node gpu02" in finding["evidence"]


def test_hang_names_the_stuck_rank_and_the_pod_that_was_killed_first(
    job: tuple[Network, KubeApi], tmp_path: Path
) -> None:
    _, api = job
    result = distdiag("hang", "--json", "--kube", "job-name=train", "--save", str(tmp_path), env=api.env)
    data = result.report["data"]
    assert (data["class_name"], data["ranks"]) == ("not-in-collective", [2]), result.out + result.err
    killed = result.findings["oom-killed"]
    assert (killed["level"], killed["where"]["hosts"]) == ("fail", ["train-1"])
    assert result.report["summary"].startswith("train-1 was OOM-killed 2 min ago; ")
    assert killed["evidence"][0].startswith("train-1: container pytorch, OOMKilled, exit code 137, memory limit 64Gi")
    assert "the job lost a rank there" in killed["evidence"][1]
    again = distdiag("hang", "--json", "--from", str(tmp_path))
    assert (again.code, again.report["summary"]) == (result.code, result.report["summary"])


def test_doctor_reads_each_pod_and_the_killed_one_is_a_warning(job: tuple[Network, KubeApi]) -> None:
    network, api = job
    result = distdiag("doctor", "--kube", "job-name=train", "--json", env=api.env)
    assert len(result.report["data"]["nodes"]) == len(network.nodes), result.out + result.err
    killed = next(finding for finding in result.report["findings"] if finding["id"] == "kube.oom-killed")
    assert (killed["level"], killed["where"]["hosts"]) == ("warn", ["train-1"])


def test_logs_of_a_selector_have_the_container_before_its_restart(job: tuple[Network, KubeApi]) -> None:
    _, api = job
    result = distdiag("logs", "--json", "--kube", "job-name=train", env=api.env)
    assert result.code == 1, result.out + result.err
    names = {source["path"] for source in result.report["data"]["sources"]}
    assert {"pod/train-1/pytorch", "pod/train-1/pytorch (previous)", "pod/train-2/istio-proxy"} <= names
    assert len(names) == 7
    [failure] = [each for each in result.report["data"]["failures"] if each["rank"] == 2]
    assert "MemoryError" in failure["what"]
    assert failure["file"] == "pod/train-1/pytorch (previous)"


def test_a_debug_container_gives_the_same_answer(job: tuple[Network, KubeApi]) -> None:
    _, api = job
    before = len(api.requests)
    image = ("--kube-debug", "python:3.12")
    result = distdiag("pyspy-all", "--json", "--kube", "job-name=train", *image, *SOON, env=api.env)
    assert outliers(result) == [([2], "load_batch")], result.out + result.err
    asked = [line.split("?")[0].split("/pods")[1] for line in api.requests[before:] if "/pods" in line]
    assert sorted(line for line in asked if line.endswith("ephemeralcontainers")) == [
        f"/train-{rank}/ephemeralcontainers" for rank in range(3)
    ]
    [debugger] = api.pods["train-0"].manifest["spec"]["ephemeralContainers"]
    assert (debugger["targetContainerName"], debugger["securityContext"]) == ("pytorch", {"privileged": True})


def case(folder: Path, pods: Sequence[FakePod]) -> KubeApi:
    need_kubectl()
    need("unshare", "mount")
    return KubeApi(folder, pods)


def states(result: Result) -> dict[str, str]:
    rows = {}
    for finding in result.report["findings"]:
        if finding["id"].startswith("hosts."):
            rows.update(dict.fromkeys(finding["where"]["hosts"], finding["id"].removeprefix("hosts.")))
    return rows


def blocked(*arguments: str, api: KubeApi) -> Result:
    return distdiag("trace", "blocked", "--json", *arguments, env=api.env)


def test_each_pod_has_a_row(tmp_path: Path) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image train:9"}}
    failed = {"terminated": {"reason": "Error", "exitCode": 139, "finishedAt": stamp(30)}}
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU"}
    evicted = {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}

    def pod(name: str, phase: str = "Running", state: dict[str, Any] | None = None, **more: Any) -> FakePod:  # noqa: ANN401
        statuses = {"pytorch": {"state": state}} if state is not None else None
        manifest = pod_manifest(name, labels=LABELS, phase=phase, statuses=statuses, **more)
        return FakePod(manifest, enter=named(name))

    pods = [
        pod("good"),
        pod("pull", "Pending", waiting),
        pod("wait", "Pending", {}, status={"conditions": [unscheduled]}),
        pod("crash", "Failed", failed),
        pod("evict", "Failed", {}, status=evicted),
        pod("bare"),
        pod("gone"),
        pod("mute"),
    ]
    pods[-3].enter = ["/no/such/shell"]
    pods[-2].enter = ["sh", "-c", "exit 137"]
    pods[-1].silent = True
    with case(tmp_path, pods) as api:
        result = blocked("--kube", "job-name=train", "--host-timeout", "10", api=api)
        assert states(result) == {
            "pull": "not-running",
            "wait": "not-running",
            "crash": "not-running",
            "evict": "not-running",
            "bare": "no-python",
            "gone": "killed",
            "mute": "timeout",
        }, result.out + result.err
        levels = {
            (finding["id"], finding["level"]): re.sub(r" \d+ (s|min) ago$", "", finding["title"])
            for finding in result.report["findings"]
            if finding["id"].startswith("kube.")
        }
    assert levels == {
        ("kube.container-failed", "fail"): "crash failed with exit code 139 (SIGSEGV)",
        ("kube.evicted", "fail"): "evict was evicted",
        ("kube.not-started", "fail"): "pull: not started: ImagePullBackOff",
        ("kube.not-started", "warn"): "wait: not started: Unschedulable",
    }


def test_a_right_that_is_missing_is_named_by_verb_and_resource(tmp_path: Path) -> None:
    with case(tmp_path, [FakePod(pod_manifest("train-0", labels=LABELS), enter=named("train-0"))]) as api:
        api.forbidden = {("create", "pods/exec")}
        result = blocked("--kube", "job-name=train", api=api)
        assert states(result) == {"train-0": "auth"}, result.out + result.err
        assert "no right to create pods/exec in namespace ml" in result.out
        assert "kubectl auth can-i create pods/exec --namespace ml" in result.out
        api.forbidden = {("list", "pods")}
        result = blocked("--kube", "job-name=train", api=api)
        assert result.code == 3
        assert result.report["error"]["message"] == 'no right to list pods in namespace ml (user "dev")'


def test_a_namespace_that_forbids_privileged_containers_forbids_the_debug_container(tmp_path: Path) -> None:
    with case(tmp_path, [FakePod(pod_manifest("train-0", labels=LABELS), enter=named("train-0"))]) as api:
        api.pod_security = "baseline"
        result = blocked("--kube", "job-name=train", "--kube-debug", "python:3.12", api=api)
    assert states(result) == {"train-0": "auth"}, result.out + result.err
    assert "its namespace forbids privileged containers (PodSecurity)" in result.out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--kube", "job-name=other"), 3, "no pod matches --kube job-name=other"),
        (("--kube", "cronjob/train"), 2, "unknown kind 'cronjob'"),
        (("--kube", "job-name=train", "--context", "none"), 3, "context was not found"),
        (("--namespace", "ml"), 2, "--namespace without a selector"),
        (("--kube", "app=x", "--via", "ssh {host}"), 2, "--kube always uses kubectl"),
        (("--kube", "app=x", "--hosts", "n1"), 2, "--hosts and --kube both select hosts"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, arguments: Sequence[str], code: int, says: str) -> None:
    with case(tmp_path, [FakePod(pod_manifest("train-0", labels=LABELS))]) as api:
        result = blocked(*arguments, api=api)
    assert result.code == code
    assert says in result.report["error"]["message"]


def test_without_kubectl(tmp_path: Path) -> None:
    result = distdiag("trace", "blocked", "--json", "--kube", "app=x", env={"PATH": str(tmp_path)})
    assert (result.code, result.report["error"]["message"]) == (
        3,
        "kubectl is not installed here: cannot query Kubernetes",
    )


def test_an_api_server_that_does_not_answer_costs_its_deadline(tmp_path: Path) -> None:
    need_kubectl()
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        cluster = {"name": "test", "cluster": {"server": address}}
        context = {"name": "test", "context": {"cluster": "test", "user": ""}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context]}
        (tmp_path / "config").write_text(json.dumps({**config, "current-context": "test"}))
        env = {"KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        result = distdiag("trace", "blocked", "--json", "--kube", "app=x", env=env)
    assert result.code == 3
    assert "the API server of the current context did not answer" in result.report["error"]["message"]


def test_the_container_is_the_declared_one_that_with_gpus_or_the_first() -> None:
    from distdiag.cluster.pods import parse_pods

    def chosen(*containers: dict[str, Any], declared: str = "") -> str:
        pod = pod_manifest("train-0", containers=list(containers))
        if declared:
            pod["metadata"]["annotations"] = {"kubectl.kubernetes.io/default-container": declared}
        return parse_pods(pod, 0.0)[0].container

    proxy: dict[str, Any] = {"name": "proxy"}
    main: dict[str, Any] = {"name": "main"}
    gpus: dict[str, Any] = {"name": "train", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    assert chosen(proxy, main) == "proxy"
    assert chosen(proxy, gpus) == "train"
    assert chosen(proxy, main, declared="main") == "main"
    assert chosen(proxy, {"name": "pytorch"}, gpus) == "pytorch"
