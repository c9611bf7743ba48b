"""Kubernetes' reports on a job's pods: killed, evicted, ended, or not started. Pure.

A killed container explains a hang if the others have run since before: their ranks wait for a dead process. If all were
started later, it is history, and a warning.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold_within
from distdiag.ids import Id
from distdiag.record import record
from distdiag.report import Finding, Fix, Level, Report, Verdict, Where, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.cluster.pods import Container, End, Pod

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
_SIGNALLED = 128
_ABOUT_NODES = ("allreduce-bench", "cuda-env", "doctor", "gpu-test", "ports")
"""Commands that diagnose no job: their findings are not consequences of a killed container."""
_OOM_FIX = (
    "this is host memory, not GPU memory: raise the container's memory limit, or hold less in the ranks (DataLoader "
    "workers and prefetch, pinned buffers, checkpoints in /dev/shm, which counts as the container's memory)"
)


@record(kw_only=True)
class _Ended:
    """A container that ended; `again`: it was restarted."""

    pod: Pod
    container: Container
    end: End
    again: bool


def with_pods(report: Report[Any], pods: Sequence[Pod], error: str = "") -> Report[Any]:
    """Add findings about the pods to a report; causes precede their consequences.

    `error`: why the pods' final states could not be read.
    """
    if error:
        title = f"restarts and last states of the pods are unknown: {error}"
        failed = Finding(id=Id.KUBE_STATES_NOT_READ, level=Level.WARN, title=title)
        return replace(report, findings=(*report.findings, failed))
    is_fine = report.verdict in (Verdict.OK, Verdict.WARN)
    found = list(pod_findings(pods, is_fine=is_fine or report.command in _ABOUT_NODES))
    placed = tuple(_with_nodes(finding, {pod.name: pod for pod in pods}) for finding in report.findings)
    worst = [finding for finding in found if finding.level is Level.FAIL]
    summary = report.summary
    if worst:
        more = f"; {report.summary}" if report.verdict is Verdict.FAIL else ""
        summary = worst[0].title + more
    return replace(report, findings=(*worst, *placed, *(each for each in found if each not in worst)), summary=summary)


def _with_nodes(finding: Finding, pods: dict[str, Pod]) -> Finding:
    if finding.level is Level.INFO:
        return finding
    nodes = [f"{name} is on node {pods[name].node}" for name in finding.where.hosts if name in pods and pods[name].node]
    more = [f"... and {len(nodes) - _MOST_NODES} more"] if len(nodes) > _MOST_NODES else []
    return replace(finding, evidence=(*finding.evidence, *nodes[:_MOST_NODES], *more))


_MOST_NODES = 8


def pod_findings(pods: Sequence[Pod], *, is_fine: bool) -> Iterator[Finding]:
    """Yield findings about ended pods. `is_fine`: no other fault was found, so that these are history."""
    ended = [each for pod in pods for each in _ended(pod)]
    groups: dict[tuple[Id, str, int, Level], list[_Ended]] = {}
    for each in ended:
        id_ = _id(each)
        if id_ is None:
            continue
        level = Level.FAIL if not is_fine and _is_missed(each, pods) else Level.WARN
        groups.setdefault((id_, each.end.reason, each.end.exit_code, level), []).append(each)
    for (id_, _, _, level), group in groups.items():
        yield _finding(id_, level, sorted(group, key=lambda each: each.end.at), pods)
    yield from _not_started(pods)


def _ended(pod: Pod) -> Iterator[_Ended]:
    for container in pod.containers:
        if container.end is not None:
            yield _Ended(pod=pod, container=container, end=container.end, again=False)
        elif container.last is not None:
            yield _Ended(pod=pod, container=container, end=container.last, again=True)
    if pod.reason == "Evicted" and not any(container.end for container in pod.containers):
        from distdiag.cluster.pods import End

        yield _Ended(pod=pod, container=pod.main, end=End(reason="Evicted"), again=False)


def _id(each: _Ended) -> Id | None:
    if each.pod.reason == "Evicted":
        return Id.KUBE_EVICTED
    if each.end.reason == "OOMKilled":
        return Id.KUBE_OOM_KILLED
    return Id.KUBE_CONTAINER_FAILED if each.end.exit_code else None


def _is_missed(each: _Ended, pods: Sequence[Pod]) -> bool:
    """Return whether ranks of other pods have run since before this container ended, so that they were in one job."""
    if each.pod.replaced or each.container.name != each.pod.container:
        return False
    return bool(_older(each, pods)) or not each.again


def _older(each: _Ended, pods: Sequence[Pod]) -> list[str]:
    return [
        pod.name
        for pod in pods
        if pod.name != each.pod.name and pod.is_running and 0 < pod.main.started_at < each.end.at
    ]


def _finding(id_: Id, level: Level, group: Sequence[_Ended], pods: Sequence[Pod]) -> Finding:
    last = group[-1]
    names = list(dict.fromkeys(each.pod.name for each in group))
    who = fold_within(names, 30)
    what = {Id.KUBE_EVICTED: "evicted", Id.KUBE_OOM_KILLED: "OOM-killed"}.get(id_)
    are = "was" if len(names) == 1 else "were"
    happened = f"{are} {what}" if what else f"failed with {_exit(last.end.exit_code)}"
    older = _older(last, pods)
    evidence = [_describe(each) for each in group[:_MOST_NODES]]
    if len(group) > _MOST_NODES:
        evidence.append(f"... and {len(group) - _MOST_NODES} more")
    if last.pod.message:
        evidence.append(last.pod.message)
    if older:
        evidence.append(
            f"{fold_within(older, 60)} run{'s' if len(older) == 1 else ''} since before that: the job lost a rank there"
        )
    elif last.again:
        evidence.append("all other pods have been started since")
    return Finding(
        id=id_,
        level=level,
        title=f"{who} {happened}{_ago(last)}",
        where=Where(hosts=tuple(names)),
        evidence=tuple(evidence),
        fix=_fix(id_, last),
    )


def _describe(each: _Ended) -> str:
    container, end = each.container, each.end
    words = [f"{each.pod.name}: container {container.name}", end.reason]
    words.append(f"exit code {end.exit_code}" if end.reason != "Evicted" else "")
    words.append(
        f"memory limit {container.memory_limit}" if end.reason == "OOMKilled" and container.memory_limit else ""
    )
    words.append(f"ran for {_duration(end.at - end.started_at)}" if 0 < end.started_at < end.at else "")
    words.append(f"restarts {container.restarts}" if container.restarts else "")
    words.append(f"node {each.pod.node}" if each.pod.node else "")
    return ", ".join(filter(None, words))


def _exit(code: int) -> str:
    name = ""
    if _SIGNALLED < code < _SIGNALLED + 65:
        try:
            name = f" ({signal.Signals(code - _SIGNALLED).name})"
        except ValueError:
            name = ""
    return f"exit code {code}{name}"


def _ago(each: _Ended) -> str:
    return f" {_duration(each.pod.read_at - each.end.at)} ago" if 0 < each.end.at < each.pod.read_at else ""


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{seconds:.0f} s"


def _fix(id_: str, each: _Ended) -> Fix:
    pod = each.pod
    at = f"--namespace {quoted(pod.namespace)}"
    if id_ == Id.KUBE_OOM_KILLED:
        return Fix(text=_OOM_FIX, commands=(f"kubectl top pod {pod.name} {at} --containers",))
    if id_ == Id.KUBE_EVICTED:
        text = "its node ran short: request what it uses (ephemeral-storage, memory), and write less to the node's disk"
        return Fix(text=text, commands=(f"kubectl describe pod {pod.name} {at}",))
    previous = " --previous" if each.again else ""
    command = f"kubectl logs {pod.name} {at} -c {quoted(each.container.name)}{previous} --tail 100"
    return Fix(text="read its last output; all pods at once: distdiag logs --kube SELECTOR", commands=(command,))


def _not_started(pods: Sequence[Pod]) -> Iterator[Finding]:
    """Yield pods that have not started, by reason: failures if they never will without a change."""
    groups: dict[str, list[tuple[Pod, str]]] = {}
    for pod in pods:
        waiting = next((each for each in pod.containers if each.reason in _PULL), None)
        reason = waiting.reason if waiting else pod.reason if pod.phase == "Pending" else ""
        if reason:
            groups.setdefault(reason, []).append((pod, waiting.message if waiting else pod.message))
    for reason, group in groups.items():
        names = [pod.name for pod, _ in group]
        at = f"--namespace {quoted(group[0][0].namespace)}"
        yield Finding(
            id=Id.KUBE_NOT_STARTED,
            level=Level.FAIL if reason in _PULL else Level.WARN,
            title=f"{fold_within(names, 40)}: not started: {reason}",
            where=Where(hosts=tuple(names)),
            evidence=(group[0][1],) if group[0][1] else (),
            fix=Fix(text="see why", commands=(f"kubectl describe pod {names[0]} {at}",)),
        )
