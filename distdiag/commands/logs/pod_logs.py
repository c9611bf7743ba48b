"""Logs of pods by kubectl, including the previous run of restarted containers, which a pod keeps."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from distdiag.cluster.pods import find_pods
from distdiag.facts import programs
from distdiag.facts.text import printable
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.cluster.pods import Kube, Pod
    from distdiag.facts.logs.collect import Reader
    from distdiag.output import Progress

_TIMEOUT_S = 300.0
"""Per log; read as fast as the API server sends."""
_WIDTH = 16
_MOST_BYTES = 256 * 2**20
# kubectl may send more than the limit on captured output.
_TO_FILE = 'exec "$@" >"$0"'


@record
class _Log:
    pod: Pod
    container: str
    previous: bool

    @property
    def name(self) -> str:
        """The name in reports, in kubectl's notation."""
        return f"pod/{self.pod.name}/{self.container}" + (" (previous)" if self.previous else "")


def read(kube: Kube, reader: Reader, progress: Progress) -> None:
    """Read the logs of all containers of the selected pods. Raises as `find_pods`."""
    progress.now("reading the states of the pods")
    logs = [log for pod in find_pods(kube) for log in _logs(pod)]
    with tempfile.TemporaryDirectory(prefix="distdiag-logs-") as folder:
        files = {log: os.path.join(folder, str(number)) for number, log in enumerate(logs)}
        commands = {log: ["sh", "-c", _TO_FILE, file, *_command(kube, log)] for log, file in files.items()}
        progress.news(f"reading {len(logs)} logs of {len({log.pod.name for log in logs})} pods")
        ends = {}
        for log, done in programs.run_many(commands, _TIMEOUT_S, width=_WIDTH):
            ends[log] = done
            progress.now(f"{len(ends)} of {len(logs)} logs read")
        later = _generation(logs)
        for log in logs:
            error = _why_not(ends[log])
            if os.path.exists(files[log]) and (os.path.getsize(files[log]) or not error):
                reader.read_output(log.name, files[log], None, 0 if log.previous else later)
            if error:
                reader.unreadable(log.name, error)


def _logs(pod: Pod) -> Iterator[_Log]:
    for container in pod.containers:
        if container.last is not None:
            yield _Log(pod, container.name, previous=True)
        if container.state in ("running", "terminated"):
            yield _Log(pod, container.name, previous=False)


def _generation(logs: Sequence[_Log]) -> int:
    """Return the generation of the current logs: 1 if every pod has been restarted, else 0."""
    current = {(log.pod.name, log.container) for log in logs if log.container == log.pod.container}
    again = {(log.pod.name, log.container) for log in logs if log.previous and log.container == log.pod.container}
    return int(bool(again) and current == again)


def _command(kube: Kube, log: _Log) -> list[str]:
    previous = ["--previous"] if log.previous else []
    at = ["--namespace", log.pod.namespace, log.pod.name, "-c", log.container]
    return kube.kubectl("logs", *at, "--prefix", *previous, f"--limit-bytes={_MOST_BYTES}")


def _why_not(done: programs.Done | None) -> str:
    if done is None:
        return "kubectl cannot be started"
    if done.timed_out:
        return f"not read to its end within {_TIMEOUT_S:g} s"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return "" if done.status == 0 else printable(lines[-1])[:300] if lines else f"kubectl ended with {done.status}"
