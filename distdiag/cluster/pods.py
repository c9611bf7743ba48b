"""Pods as hosts: selection, state, and the job's container.

Read by kubectl, with the user's own configuration and rights. The cluster is not changed.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from distdiag.errors import DistdiagError, UsageError
from distdiag.facts import programs
from distdiag.facts.text import printable
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

API_TIMEOUT_S = 10.0
"""Per request to the API server; kubectl itself has slightly longer."""
_KUBECTL_MORE_S = 5.0
_LABELS = {
    "job": "job-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    "mpijob": "training.kubeflow.org/job-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
    "raycluster": "ray.io/cluster",
    "leaderworkerset": "leaderworkerset.sigs.k8s.io/name",
    "vcjob": "volcano.sh/job-name",
}
"""The label set by a controller on its pods, by the usual short name of the kind."""
_INDEXES = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
)
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_GPU = re.compile(r"\.com/(gpu|mig-.*)$")


@record(kw_only=True)
class End:
    """The end of a container. Times in seconds since 1970, 0 if unknown."""

    reason: str = ""
    exit_code: int = 0
    started_at: float = 0.0
    at: float = 0.0


@record(kw_only=True)
class Container:
    """A container of a pod. `reason`, `message`: why it waits; `end`: its end; `last`: the previous one."""

    name: str
    state: str = ""
    reason: str = ""
    message: str = ""
    started_at: float = 0.0
    restarts: int = 0
    memory_limit: str = ""
    end: End | None = None
    last: End | None = None


@record(kw_only=True)
class Pod:
    """A pod as reported by the API server. `container`: the job's; `read_at`: seconds since 1970.

    `replaced`: it has ended, and its controller has started a replacement.
    """

    name: str
    namespace: str
    node: str = ""
    phase: str = ""
    reason: str = ""
    message: str = ""
    read_at: float = 0.0
    created_at: float = 0.0
    owner_kind: str = ""
    owner: str = ""
    index: str = ""
    container: str = ""
    containers: tuple[Container, ...] = ()
    replaced: bool = False

    @property
    def main(self) -> Container:
        """Return the container of the job."""
        found = (container for container in self.containers if container.name == self.container)
        return next(found, Container(name=self.container))

    @property
    def is_running(self) -> bool:
        """Return whether a program can be started in it."""
        return self.phase == "Running" and self.main.state in ("running", "")


@record(kw_only=True)
class Kube:
    """The options for pods: --kube, --namespace, --context, --container, --kube-debug."""

    selector: str
    namespace: str = ""
    context: str = ""
    container: str = ""
    debug_image: str = ""

    def kubectl(self, *words: str) -> list[str]:
        """Return a kubectl command line in this context and namespace."""
        context = ["--context", self.context] if self.context else []
        return ["kubectl", *context, *(["--namespace", self.namespace] if self.namespace else []), *words]

    def get(self) -> list[str]:
        """Return the command line that lists the pods. Raises UsageError for an invalid selector."""
        chosen = _selection(self.selector)
        return self.kubectl("get", "pods", *chosen, "-o", "json", f"--request-timeout={API_TIMEOUT_S:g}s")


def _selection(selector: str) -> list[str]:
    kind, slash, name = selector.partition("/")
    if not slash or re.search(r"[=!(,\s.]", kind) or re.search(r"[=!(\s]", name):
        return ["--selector", selector]
    kind = kind.lower().removesuffix("s")
    names = [part.rpartition("/")[2] for part in name.split(",")]
    if not all(map(_NAME.fullmatch, names)):
        raise UsageError(f"--kube {selector!r}: not a name of Kubernetes", hint="--kube pod/train-worker-0")
    if kind in ("pod", "po"):
        return [*names, "--ignore-not-found"]
    if kind not in _LABELS:
        known = ", ".join(f"{each}/NAME" for each in ("pod", *_LABELS))
        raise UsageError(f"--kube {selector!r}: unknown kind {kind!r}", hint=f"give a label, as app=train, or {known}")
    return ["--selector", f"{_LABELS[kind]}={name}"]


def find_pods(kube: Kube) -> tuple[Pod, ...]:
    """List the selected pods.

    Raises:
        UsageError: invalid selector.
        DistdiagError: kubectl is missing, the API server does not answer or refuses, or no pod matches.
    """
    pods = read_pods(kube)
    if not pods:
        where = f"namespace {kube.namespace}" if kube.namespace else "the namespace of the current context"
        raise DistdiagError(
            f"no pod matches --kube {kube.selector} in {where}",
            hint="list them with their labels: " + " ".join(kube.kubectl("get", "pods", "--show-labels")),
        )
    return pods


def read_pods(kube: Kube) -> tuple[Pod, ...]:
    """List the pods in the API server's current state. Raises as `find_pods`."""
    if shutil.which("kubectl") is None:
        raise DistdiagError(
            "kubectl is not installed here: cannot query Kubernetes", hint="run distdiag where kubectl get pods works"
        )
    try:
        done = programs.run(kube.get(), timeout_s=API_TIMEOUT_S + _KUBECTL_MORE_S, most_bytes=_MOST_BYTES)
    except programs.CannotRun as error:
        raise DistdiagError(str(error), hint="run distdiag where kubectl get pods works") from error
    if done.timed_out or done.status:
        raise _refused(kube, done)
    if not done.stdout.strip():
        return ()
    try:
        return parse_pods(json.loads(done.stdout), datetime.now(UTC).timestamp(), kube.container)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DistdiagError(
            f"kubectl returned no list of pods: {printable(str(error)[:200])}", hint=" ".join(kube.get())
        ) from error


_MOST_BYTES = 64 * 2**20
_FORBIDDEN = re.compile(r'User "([^"]*)" cannot (\w+) resource "([^"]*)"(?:.* in the namespace "([^"]*)")?')


def missing_right(words: str) -> tuple[str, str] | None:
    """Parse the API server's refusal into the missing right and the command that checks it."""
    match = _FORBIDDEN.search(words)
    if match is None:
        return None
    user, verb, resource, namespace = match.groups()
    where = f" in namespace {namespace}" if namespace else ""
    ask = f"kubectl auth can-i {verb} {resource}" + (f" --namespace {namespace}" if namespace else "")
    return f'no right to {verb} {resource}{where} (user "{printable(user)}")', ask


def _refused(kube: Kube, done: programs.Done) -> DistdiagError:
    lines = [printable(line) for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1][:300] if lines else f"it ended with status {done.status}"
    context = f"context {kube.context}" if kube.context else "the current context"
    if right := missing_right(last):
        return DistdiagError(right[0], hint=f"{right[1]}; ask for a role with get and list on pods")
    if done.timed_out or re.search("Client.Timeout|context deadline exceeded|i/o timeout|TLS handshake timeout", last):
        return DistdiagError(
            f"the API server of {context} did not answer within {API_TIMEOUT_S:g} s",
            hint="check the VPN or proxy; choose another: kubectl config get-contexts, then --context NAME",
        )
    if re.search("context .*(does not exist|was not found)|no context exists", last):
        return DistdiagError(
            last.removeprefix("error: ").removeprefix("Error in configuration: "), hint="kubectl config get-contexts"
        )
    if re.search("Unauthorized|must be logged in|provide credentials", last):
        return DistdiagError(f"{context} does not know you: {last}", hint="log in to the cluster again")
    return DistdiagError(f"kubectl get pods failed: {last}", hint=" ".join(kube.get()))


def parse_pods(document: Mapping[str, Any], read_at: float, container: str = "") -> tuple[Pod, ...]:
    """Parse the output of `kubectl get pods -o json`: a list, or one pod.

    Raises ValueError, TypeError, KeyError or AttributeError for anything else.
    """
    items = document["items"] if document.get("kind", "").endswith("List") else [document]
    return _mark_replaced([_pod(item, read_at, container) for item in items])


def _pod(item: Mapping[str, Any], read_at: float, container: str) -> Pod:
    meta, spec, status = item["metadata"], item["spec"], item.get("status", {})
    if not _NAME.fullmatch(meta["name"]) or not _NAME.fullmatch(meta.get("namespace", "default")):
        raise ValueError("a pod with a name that none can have")
    owner = _first(meta.get("ownerReferences", ()), "controller", True)
    labels = {**meta.get("labels", {}), **meta.get("annotations", {})}
    # A sidecar is an init container that keeps running, and never the job's.
    states = {each["name"]: each for each in status.get("containerStatuses", ())}
    specs = spec.get("containers", ())
    chosen = container or _choose(specs, meta.get("annotations", {}))
    scheduled = _first(status.get("conditions", ()), "type", "PodScheduled")
    return Pod(
        name=str(meta["name"]),
        namespace=str(meta.get("namespace", "default")),
        node=str(spec.get("nodeName", "")),
        phase=str(status.get("phase", "")),
        reason=str(status.get("reason") or (scheduled.get("reason") if scheduled.get("status") == "False" else "")),
        message=printable(str(status.get("message") or scheduled.get("message", "")))[:400],
        read_at=read_at,
        created_at=_seconds(meta.get("creationTimestamp")),
        owner_kind=str(owner.get("kind", "")),
        owner=str(owner.get("name", "")),
        index=next((str(labels[name]) for name in _INDEXES if name in labels), ""),
        container=chosen,
        containers=tuple(_container(each, states.get(each["name"], {})) for each in specs),
    )


def _first(items: Iterable[Mapping[str, Any]], name: str, value: object) -> Mapping[str, Any]:
    return next((item for item in items if item.get(name) == value), {})


def _container(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Container:
    states: Mapping[str, Mapping[str, Any]] = status.get("state") or {}
    state, details = next(iter(states.items()), ("", {}))
    last = (status.get("lastState") or {}).get("terminated")
    return Container(
        name=str(spec["name"]),
        state=state,
        reason=str(details.get("reason", "")),
        message=printable(str(details.get("message", "")))[:400],
        started_at=_seconds(details.get("startedAt")),
        restarts=int(status.get("restartCount", 0)),
        memory_limit=str(spec.get("resources", {}).get("limits", {}).get("memory", "")),
        end=_end(details) if state == "terminated" else None,
        last=_end(last) if last else None,
    )


def _end(details: Mapping[str, Any]) -> End:
    started, ended = _seconds(details.get("startedAt")), _seconds(details.get("finishedAt"))
    return End(
        reason=str(details.get("reason", "")), exit_code=int(details.get("exitCode", 0)), started_at=started, at=ended
    )


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _choose(specs: Sequence[Mapping[str, Any]], annotations: Mapping[str, str]) -> str:
    """Return the job's container: declared, Kubeflow's, the only one with GPUs, else the first."""
    names = [each["name"] for each in specs]
    declared = annotations.get("kubectl.kubernetes.io/default-container")
    with_gpus = [each["name"] for each in specs if any(map(_GPU.search, each.get("resources", {}).get("limits", ())))]
    if declared in names:
        return str(declared)
    if "pytorch" in names:  # required by Kubeflow
        return "pytorch"
    found = with_gpus if len(with_gpus) == 1 else names
    return str(found[0]) if found else ""


def _mark_replaced(pods: Sequence[Pod]) -> tuple[Pod, ...]:
    """Mark ended pods with a younger pod of the same controller and index."""

    def is_replaced(pod: Pod) -> bool:
        return (
            pod.phase in ("Failed", "Succeeded")
            and bool(pod.owner)
            and any(
                (other.owner_kind, other.owner, other.index) == (pod.owner_kind, pod.owner, pod.index)
                and other.created_at > pod.created_at
                and (pod.index or pod.phase == "Failed")
                for other in pods
            )
        )

    return tuple(replace(pod, replaced=True) if is_replaced(pod) else pod for pod in pods)
