"""kubectl exec into a container of each pod; with --kube-debug, kubectl debug beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.pods import missing_right
from distdiag.cluster.transports.command import CommandTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host
    from distdiag.cluster.links import ProcessLink
    from distdiag.cluster.pods import Kube, Pod
    from distdiag.cluster.transports import Arrivals

_NOT_PRIVILEGED = "its namespace forbids privileged containers (PodSecurity)"
_ENDED = (
    (r"executable file not found|no such file or directory.*exec", HostState.NO_PYTHON, "its image has no shell (sh)"),
    (r"\(NotFound\): pods", HostState.NOT_RUNNING, "the pod has been deleted"),
    (r"violates PodSecurity", HostState.AUTH, _NOT_PRIVILEGED),
    (r"container not found|container \S+ is not valid for pod", HostState.NOT_RUNNING, "the container is not there"),
    (r"cannot exec into a container in a completed pod", HostState.NOT_RUNNING, "the pod has ended"),
    (r"command terminated with exit code 137", HostState.KILLED, "the agent was killed, or its container was"),
    (r"Client.Timeout|context deadline exceeded|i/o timeout|error dialing backend", HostState.TIMEOUT, ""),
    (r"connection refused|Unable to connect to the server", HostState.REFUSED, ""),
)
"""Messages of kubectl and the API server; an empty message keeps the original."""
_HINTS = {
    _NOT_PRIVILEGED: "leave out --kube-debug, or have the namespace's level raised to privileged",
    "its image has no shell (sh)": "look into it from another image: --kube-debug IMAGE, an image with sh and python3",
}
_WAITING_HINTS = {
    "ImagePullBackOff": "check the image's name and the pull secret: kubectl describe pod {pod}",
    "ErrImagePull": "check the image's name and the pull secret: kubectl describe pod {pod}",
    "CrashLoopBackOff": "read its last output: kubectl logs {pod} --previous",
    "Unschedulable": "free what it asks for, or ask for less: kubectl describe pod {pod}",
}


class KubeTransport(CommandTransport):
    """A kubectl for each pod, at most as many starting at once as `width`."""

    def __init__(
        self, kube: Kube, pods: Sequence[Pod], shell: str, shell_lines: bytes, *, width: int | None = None
    ) -> None:
        super().__init__(shell, shell_lines, width=width)
        self._kube = kube
        self._pods = {pod.name: pod for pod in pods}

    def argv(self, host: Host) -> list[str]:
        pod = self._pods[host.name]
        where = replace(self._kube, namespace=pod.namespace)
        if not self._kube.debug_image:
            return where.kubectl("exec", "-i", pod.name, "-c", pod.container, "--", self._shell)
        image = ("--image", self._kube.debug_image, "--target", pod.container, "--profile=sysadmin")
        return where.kubectl("debug", "-i", "--quiet", pod.name, *image, "--", self._shell)

    def _start(self, host: Host, arrivals: Arrivals) -> ProcessLink | None:
        pod = self._pods[host.name]
        if pod.is_running:
            return super()._start(host, arrivals)
        arrivals.put(host.name, _not_running(pod))
        return None

    def explain_end(self, refusal: HostError) -> HostError:
        words = " ".join(refusal.evidence)
        if right := missing_right(words):
            return replace(
                refusal, state=HostState.AUTH, stage="connect", message=right[0], hint="ask for it", commands=right[1:]
            )
        for pattern, state, message in _ENDED:
            if re.search(pattern, words):
                stage = refusal.stage if state is HostState.KILLED else "connect"
                hint = _HINTS.get(message, "kubectl get pod shows what became of it")
                message = message or refusal.evidence[-1]
                return replace(refusal, state=state, stage=stage, message=message, hint=hint)
        return refusal


def _not_running(pod: Pod) -> HostError:
    container = pod.main
    reason = container.reason or pod.reason
    words = reason or pod.phase
    if container.end is not None:
        words = f"{pod.phase if pod.phase != 'Running' else 'its container has ended'} ({words}"
        words += f", exit code {container.end.exit_code})"
    message = container.message or pod.message
    hint = _WAITING_HINTS.get(reason, "see why: kubectl describe pod {pod}").format(pod=pod.name)
    return HostError(
        state=HostState.NOT_RUNNING,
        stage="start",
        message=f"{pod.phase}: {words}" if pod.phase not in words else words,
        hint=f"{hint} --namespace {pod.namespace}",
        evidence=(message,) if message else (),
    )
