"""A small API server of Kubernetes for the real kubectl: pods, their logs, exec, and debug containers.

Programs started "in a container" run on this machine, behind the words that enter the container. It uses HTTP, and for
exec and attach WebSockets (RFC 6455) with the subprotocol v5.channel.k8s.io: byte 0 of a message is the channel.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, BinaryIO, Self
from urllib.parse import parse_qs, urlsplit

import pytest
from support import need

if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import BufferedIOBase
    from pathlib import Path

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_VERBS = ["create", "delete", "get", "list", "patch", "watch"]


def need_kubectl() -> None:
    """Skip where there is no kubectl that speaks WebSockets (1.30 or newer); fail where it is promised."""
    need("kubectl")
    words = ["kubectl", "version", "--client", "-o", "json"]
    text = subprocess.run(words, capture_output=True, check=True, timeout=30).stdout
    version = re.search(rb'"gitVersion": "v1\.(\d+)', text)
    if version is None or int(version[1]) < 30:
        pytest.skip("kubectl is older than 1.30")


@dataclass
class FakePod:
    """A pod: its manifest with its status, how its containers are entered, and their logs by (container, previous)."""

    manifest: dict[str, Any]
    enter: Sequence[str] = ()
    logs: dict[tuple[str, bool], str] = field(default_factory=dict)
    silent: bool = False
    """Requests about it alone are never answered."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


def pod_manifest(
    name: str,
    *,
    labels: dict[str, str] | None = None,
    containers: Sequence[dict[str, Any]] = ({"name": "pytorch"},),
    node: str = "",
    phase: str = "Running",
    statuses: dict[str, dict[str, Any]] | None = None,
    **more: Any,  # noqa: ANN401 - parts of the manifest
) -> dict[str, Any]:
    """Make a pod as the API server would show it; each container runs since 2026-01-01 unless `statuses` differ."""
    names = [each["name"] for each in containers]
    image = {"image": "train:1", "imageID": "sha256:1", "ready": phase == "Running", "restartCount": 0}
    running = {**image, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    of_pod = [{"name": each, **{**running, **(statuses or {}).get(each, {})}} for each in names]
    status = {"phase": phase, "containerStatuses": of_pod, **more.pop("status", {})}
    metadata = {"name": name, "namespace": "ml", "labels": labels or {}, "uid": name, **more.pop("metadata", {})}
    of_containers = [{"image": "train:1", **each} for each in containers]
    spec = {"containers": of_containers, "securityContext": {}, **more.pop("spec", {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z", **metadata},
        "spec": {**spec, **({"nodeName": node} if node else {})},
        "status": status,
    }


class KubeApi:
    """The server, and a kubeconfig that leads to it.

    `forbidden`: pairs of verb and resource. `pod_security`: the namespace's level, which refuses privileged containers.
    """

    def __init__(self, folder: Path, pods: Sequence[FakePod]) -> None:
        self.pods = {pod.name: pod for pod in pods}
        self.forbidden: set[tuple[str, str]] = set()
        self.pod_security = ""
        self.requests: list[str] = []
        self.over = threading.Event()
        self.busy = 0
        self.most_busy = 0
        self.lock = threading.Lock()
        self._folder = folder
        api = self

        class Handler(_Handler):
            server_api = api

        self._server = _Server(("127.0.0.1", 0), Handler)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{self._server.server_address[1]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": address}}],
            "users": [{"name": "dev", "user": {"token": "secret"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "dev", "namespace": "ml"}}],
            "current-context": "test",
        }
        (self._folder / "kubeconfig").write_text(json.dumps(config))
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def env(self) -> dict[str, str]:
        """What kubectl needs in its environment."""
        return {"KUBECONFIG": str(self._folder / "kubeconfig"), "HOME": str(self._folder), "NO_PROXY": "127.0.0.1"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def handle_error(self, *_: object) -> None:
        """A client that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_api: KubeApi

    def log_message(self, *_: object) -> None:
        """Keep stderr clean."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        parts = url.path.strip("/").split("/")
        self.server_api.requests.append(f"{self.command} {self.path}")
        if url.path in _DISCOVERY:
            self._reply(_DISCOVERY[url.path])
        elif parts[:3] == ["api", "v1", "namespaces"] and len(parts) == 5 and parts[4] == "pods":
            self._watch(query) if "watch" in query else self._list(parts[3], query)
        elif parts[:3] == ["api", "v1", "namespaces"] and len(parts) >= 6 and parts[4] == "pods":
            self._pod(parts[5], parts[6] if len(parts) > 6 else "", query)
        else:
            self._fail(404, "NotFound", f"the server could not find the requested resource: {url.path}")

    do_POST = do_GET

    def do_PATCH(self) -> None:
        patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server_api.requests.append(f"PATCH {self.path}")
        name = urlsplit(self.path).path.split("/")[6]
        if self._refused("patch", "pods/ephemeralcontainers", name):
            return
        if level := self.server_api.pod_security:
            words = 'privileged (container "debugger-x" must not set securityContext.privileged=true)'
            self._fail(403, "Forbidden", f'pods "{name}" is forbidden: violates PodSecurity "{level}:latest": {words}')
            return
        pod = self.server_api.pods[name]
        for container in patch["spec"]["ephemeralContainers"]:
            pod.manifest["spec"].setdefault("ephemeralContainers", []).append(container)
            state = {"name": container["name"], "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
            pod.manifest["status"].setdefault("ephemeralContainerStatuses", []).append(state)
        self._reply(pod.manifest)

    def _list(self, namespace: str, query: dict[str, list[str]]) -> None:
        if self._refused("list", "pods"):
            return
        wanted = [part.partition("=") for part in query.get("labelSelector", [""])[0].split(",") if part]
        pods = [
            pod.manifest
            for pod in self.server_api.pods.values()
            if all(pod.manifest["metadata"]["labels"].get(key) == value for key, _, value in wanted)
            and pod.manifest["metadata"]["namespace"] == namespace
        ]
        self._reply({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": pods})

    def _watch(self, query: dict[str, list[str]]) -> None:
        """Send the pod once, as it is; nothing changes any more."""
        name = query["fieldSelector"][0].partition("=")[2]
        event = json.dumps({"type": "MODIFIED", "object": self.server_api.pods[name].manifest}).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(event)
        self.wfile.flush()
        self.server_api.over.wait(2)
        self.close_connection = True

    def _pod(self, name: str, what: str, query: dict[str, list[str]]) -> None:
        verb = "create" if what in ("exec", "attach") else "get"
        if self._refused(verb, f"pods/{what}" if what else "pods", name):
            return
        pod = self.server_api.pods.get(name)
        if pod is None:
            self._fail(404, "NotFound", f'pods "{name}" not found')
        elif pod.silent and what:
            self.server_api.over.wait(600)
        elif what == "log":
            self._log(pod, query)
        elif what in ("exec", "attach"):
            self._stream(pod, what, query)
        else:
            self._reply(pod.manifest)

    def _log(self, pod: FakePod, query: dict[str, list[str]]) -> None:
        container, previous = query.get("container", [""])[0], query.get("previous", [""])[0] == "true"
        text = pod.logs.get((container, previous))
        if text is None and previous:
            words = f'previous terminated container "{container}" in pod "{pod.name}" not found'
            self._fail(400, "BadRequest", words)
            return
        self._send(200, "text/plain", (text or "").encode())

    def _refused(self, verb: str, resource: str, name: str = "") -> bool:
        if (verb, resource) not in self.server_api.forbidden:
            return False
        which = f'pods "{name}" is forbidden' if name else "pods is forbidden"
        words = f'{which}: User "dev" cannot {verb} resource "{resource}" in API group "" in the namespace "ml"'
        self._fail(403, "Forbidden", words)
        return True

    def _fail(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        details = {"name": "", "kind": "pods"}
        self._reply({**status, "metadata": {}, "message": message, "details": details}, code)

    def _reply(self, document: dict[str, Any], code: int = 200) -> None:
        self._send(code, "application/json", json.dumps(document).encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, pod: FakePod, what: str, query: dict[str, list[str]]) -> None:
        if self.headers.get("Upgrade", "").lower() != "websocket":
            self._fail(400, "BadRequest", "only WebSockets are spoken here")
            return
        name, command = query["container"][0], query.get("command", [])
        if what == "attach":
            [container] = [each for each in pod.manifest["spec"]["ephemeralContainers"] if each["name"] == name]
            name, command = container["targetContainerName"], container["command"]
        key = base64.b64encode(hashlib.sha1(self.headers["Sec-WebSocket-Key"].encode() + _GUID).digest())
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", key.decode())
        self.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
        self.end_headers()
        self.close_connection = True
        with self.server_api.lock:
            self.server_api.busy += 1
            self.server_api.most_busy = max(self.server_api.most_busy, self.server_api.busy)
        try:
            _Stream(self.rfile, self.connection).run([*pod.enter, *command])
        finally:
            with self.server_api.lock:
                self.server_api.busy -= 1


class _Stream:
    """A program whose streams are channels of a WebSocket."""

    def __init__(self, reader: BufferedIOBase, connection: socket.socket) -> None:
        self._reader, self._connection = reader, connection
        self._lock = threading.Lock()

    def run(self, argv: Sequence[str]) -> None:
        """Run it to its end, or until the client is gone."""
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            words = f'error executing command in container: exec: "{argv[0]}": executable file not found in $PATH'
            self._finish(
                {"status": "Failure", "reason": "InternalError", "message": words, "code": 500, "e": str(error)}
            )
            return
        assert process.stdout is not None
        assert process.stderr is not None
        outputs = [
            threading.Thread(target=self._copy, args=(channel, stream), daemon=True)
            for channel, stream in ((_STDOUT, process.stdout), (_STDERR, process.stderr))
        ]
        for thread in outputs:
            thread.start()
        threading.Thread(target=self._feed, args=(process,), daemon=True).start()
        code = process.wait()
        for thread in outputs:
            thread.join(5)
        for stream in (process.stdout, process.stderr):
            stream.close()
        with contextlib.suppress(OSError):
            process.stdin.close() if process.stdin is not None else None
        causes = [{"reason": "ExitCode", "message": str(code if code >= 0 else 128 - code)}]
        failure = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        words = f"command terminated with non-zero exit code: {code}"
        self._finish({"status": "Success"} if code == 0 else {**failure, "message": words})

    def _finish(self, status: dict[str, Any]) -> None:
        document = {"kind": "Status", "apiVersion": "v1", "metadata": {}, **status}
        with contextlib.suppress(OSError):
            self._send(2, bytes([_ERROR]) + json.dumps(document).encode())
            self._send(8, struct.pack(">H", 1000))
            self._connection.shutdown(socket.SHUT_RDWR)

    def _copy(self, channel: int, stream: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(stream.fileno(), 32768):
                self._send(2, bytes([channel]) + data)

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        """Give it what comes on channel 0. A client that goes away closes its input, as the runtime does."""
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError, EOFError):
            while True:
                opcode, data = self._receive()
                if opcode == 9:
                    self._send(10, data)
                elif opcode == 8 or data[:2] == bytes([_CLOSE, _STDIN]):
                    break
                elif data[:1] == bytes([_STDIN]):
                    process.stdin.write(data[1:])
                    process.stdin.flush()
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _receive(self) -> tuple[int, bytes]:
        first, second = self._exactly(2)
        length = second & 127
        if length > 125:
            size = 2 if length == 126 else 8
            length = int.from_bytes(self._exactly(size), "big")
        mask = self._exactly(4) if second & 128 else b"\0\0\0\0"
        data = self._exactly(length)
        whole = int.from_bytes(data, "big") ^ int.from_bytes((mask * (length // 4 + 1))[:length], "big")
        return first & 15, whole.to_bytes(length, "big")

    def _exactly(self, count: int) -> bytes:
        data = self._reader.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def _send(self, opcode: int, data: bytes) -> None:
        length = len(data)
        size = bytes([length]) if length < 126 else b"\x7e" + struct.pack(">H", length)
        if length > 65535:
            size = b"\x7f" + struct.pack(">Q", length)
        with self._lock:
            self._connection.sendall(bytes([0x80 | opcode]) + size + data)


_PODS = [
    {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": _VERBS, "shortNames": ["po"]},
    *(
        {"name": f"pods/{each}", "singularName": "", "namespaced": True, "kind": "Pod", "verbs": ["get", "create"]}
        for each in ("exec", "attach", "log", "ephemeralcontainers")
    ),
]
_DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": _PODS},
    "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
}
