"""One login by paramiko: host key, authentication, command. Strict: an unknown or changed key ends it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.links import UNKNOWN_SIGNAL, Link, Received
from distdiag.cluster.transports import known_hosts
from distdiag.cluster.transports.known_hosts import KeyVerdict, KnownHosts
from distdiag.cluster.transports.threads import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import paramiko

    from distdiag.cluster.transports.known_hosts import Verdict
    from distdiag.cluster.transports.ssh_config import SshSettings


class Refused(Exception):
    """A login failed, with the reason in `refusal`."""

    def __init__(self, state: HostState, stage: str, message: str, **more: Any) -> None:  # noqa: ANN401 - of HostError
        super().__init__(message)
        self.refusal = HostError(state=state, stage=stage, message=message, **more)


class Retry(Refused):
    """The connection broke before anything was done: worth another try."""


class NeedsOpenSsh(Exception):
    """OpenSSH's client is to accept an unknown host key, or to ask for one of the known types."""


class Login:
    """Logs in to hosts, one at a time per thread; shared files are read once."""

    def __init__(self, command: str, first_words: bytes, timeout_s: float, *, accept_new: bool) -> None:
        self._command = command
        self._words = first_words
        self._timeout_s = timeout_s
        self._accept_new = accept_new
        self._known: dict[tuple[str, ...], KnownHosts] = {}
        self._lock = threading.Lock()
        self._limits = Limits()

    def needs_openssh(self, settings: SshSettings) -> bool:
        """Return whether known_hosts has a line about the host that only OpenSSH understands."""
        return self._known_hosts(settings).needs_openssh(*settings.known_as)

    def enter(self, connection: socket.socket, settings: SshSettings) -> ChannelLink:
        """Log in over a connected socket, start the command, and send it its first words.

        Raises:
            Refused: it cannot be done, and why.
            Retry: the connection broke before the login.
            NeedsOpenSsh: its host key is unknown and to be accepted, or of another type than the known ones.
        """
        import paramiko

        transport = self._authenticate(connection, settings)
        began = time.monotonic()
        try:
            # paramiko waits for the answer to exec_command for ever.
            with self._limits.within(self._timeout_s, functools.partial(_drop, transport)):
                channel = transport.open_session(timeout=self._timeout_s)
                channel.exec_command(self._command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            transport.close()
            late = time.monotonic() - began > 0.95 * self._timeout_s
            why = f"no answer within {self._timeout_s:g} s" if late else _words(error)
            state = HostState.TIMEOUT if late else HostState.FAILED
            words = f"login works, but it does not run the command: {why}"
            raise Refused(state, "session", words) from error
        link = ChannelLink(transport, channel)
        link.write(self._words)  # it may have ended already: then its output shows why
        return link

    def _authenticate(self, connection: socket.socket, settings: SshSettings) -> paramiko.Transport:
        """Check the host key and authenticate. Raises Refused or Retry, and closes the connection then."""
        import paramiko

        transport = paramiko.Transport(connection)
        transport.daemon = True
        transport.banner_timeout = self._timeout_s
        # It would start a thread for this; start_client has the same limit.
        transport.packetizer.start_handshake = lambda timeout: None
        transport.auth_timeout = self._timeout_s
        known = self._known_hosts(settings).types(*settings.known_as)
        options = transport.get_security_options()
        # RSA keys sign in several ways.
        options.key_types = sorted(options.key_types, key=lambda x: re.sub("^rsa-sha2-.*", "ssh-rsa", x) not in known)
        try:
            self._handshake(transport, settings)
            self._check_key(transport, settings)
            _prove(transport, settings)
        except Exception as error:
            _drop(transport)
            if isinstance(error, (paramiko.SSHException, EOFError, OSError)):
                raise Refused(HostState.FAILED, "login", _words(error)) from error
            raise
        return transport

    def _handshake(self, transport: paramiko.Transport, settings: SshSettings) -> None:
        import paramiko

        begin = time.monotonic()
        try:
            transport.start_client(timeout=self._timeout_s)
            transport.get_remote_server_key()  # fails if start_client returned because its time was over
        except (paramiko.SSHException, EOFError, OSError) as error:
            if time.monotonic() - begin > 0.95 * self._timeout_s:
                words = f"no complete ssh handshake within {self._timeout_s:g} s"
                raise Refused(HostState.TIMEOUT, "handshake", words) from error
            words = f"port {settings.port} aborted the ssh handshake: {_words(error)}"
            state = (
                HostState.FAILED if isinstance(error, paramiko.ssh_exception.IncompatiblePeer) else HostState.NOT_SSH
            )
            raise Retry(state, "handshake", words) from error

    def _check_key(self, transport: paramiko.Transport, settings: SshSettings) -> None:
        key = transport.get_remote_server_key()
        with self._lock:
            verdict = self._known_hosts(settings).check(*settings.known_as, key.asbytes())
        if verdict.key is KeyVerdict.CHANGED:
            raise _changed_key(settings, verdict, key)
        if verdict.key is KeyVerdict.UNKNOWN and not self._accept_new:
            raise _unknown_key(settings, key)
        if verdict.key is not KeyVerdict.KNOWN:
            raise NeedsOpenSsh

    def _known_hosts(self, settings: SshSettings) -> KnownHosts:
        files = (*settings.user_known_hosts, *settings.global_known_hosts, known_hosts.own_file())
        if files not in self._known:
            self._known[files] = KnownHosts.read(files)
        return self._known[files]


class ChannelLink(Link):
    """A command on a host, over paramiko."""

    def __init__(self, transport: paramiko.Transport, channel: paramiko.Channel) -> None:
        super().__init__()
        self._transport = transport
        self._channel = channel
        self.when_dropped: Callable[[], object] = bool  # called once
        self._fd = channel.fileno()
        channel.settimeout(0)

    def fds(self) -> tuple[int, ...]:
        return (self._fd,)

    def read(self) -> Received:
        out = err = b""
        if self._channel.recv_ready():
            out = self._channel.recv(2**18)
        if self._channel.recv_stderr_ready():
            err = self._channel.recv_stderr(2**18)
        over = (self._channel.eof_received or self._channel.closed) and not (
            self._channel.recv_ready() or self._channel.recv_stderr_ready()
        )
        return Received(out, err, over)

    def how_it_ended(self) -> tuple[int | None, str]:
        deadline = time.monotonic() + 0.3
        while not self._channel.exit_status_ready() and time.monotonic() < deadline and not self._channel.closed:
            time.sleep(0.005)
        if not self._channel.exit_status_ready():
            return None, "because the connection was cut"
        status = self._channel.recv_exit_status()
        if status >= 0:
            return status, f"with status {status}"
        if self._channel.eof_received and self._transport.is_active():
            return UNKNOWN_SIGNAL, "by a signal"  # paramiko keeps no word of which
        return None, "because the connection was cut"

    def finish(self) -> None:
        with self._lock:
            self._closing = True
            with contextlib.suppress(OSError, EOFError):
                self._channel.shutdown_write()

    def has_ended(self) -> bool:
        return self._channel.closed or self._channel.exit_status_ready() or not self._transport.is_active()

    def hang_up(self) -> None:
        import paramiko
        from paramiko.common import cMSG_CHANNEL_REQUEST

        # RFC 4254, 6.9. paramiko has no call for it, and sshd kills nothing by itself; before OpenSSH 9.8 not for root.
        request = paramiko.Message()
        request.add_byte(cMSG_CHANNEL_REQUEST)
        request.add_int(self._channel.remote_chanid)
        request.add_string("signal")
        request.add_boolean(False)
        request.add_string("HUP")
        if not self._channel.closed:
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                self._transport._send_user_message(request)

    def kill(self) -> None:
        self._closing = True
        _drop(self._transport)
        self._channel.close()  # it is closed already; this lets go of its pipe
        when_dropped, self.when_dropped = self.when_dropped, bool
        when_dropped()

    def _send(self, data: bytes) -> int:
        return int(self._channel.send(data))


def _prove(transport: paramiko.Transport, settings: SshSettings) -> None:
    """Authenticate with the agent's keys and the key files, in ssh's order. Raises Refused."""
    import paramiko

    tried: list[str] = []
    accepted: list[str] = []
    for name, key in _keys(settings, tried):
        try:
            # An empty list: logged in. Else it wants something more.
            if not transport.auth_publickey(settings.user, key):
                return
            tried.append(f"{name} (not sufficient alone)")
        except paramiko.BadAuthenticationType as error:
            accepted = list(error.allowed_types)
            break
        except paramiko.AuthenticationException:
            tried.append(name)
        if not transport.is_active():
            break
    words = f"it rejects user {settings.user}"
    words += f" with {', '.join(tried)}" if tried else ", and there is no key to try"
    words += f"; it accepts {', '.join(accepted)}" if accepted else ""
    raise Refused(HostState.AUTH, "login", words)


def _keys(settings: SshSettings, tried: list[str]) -> Iterator[tuple[str, Any]]:
    import paramiko

    if settings.uses_agent and os.environ.get("SSH_AUTH_SOCK"):
        for agent_key in paramiko.Agent().get_keys():
            yield "the agent's " + (agent_key.comment or agent_key.get_name()), agent_key
    for path in settings.identity_files:
        key = _load(path)
        if key is None:
            tried.append(f"{path} (has a passphrase: add it to ssh-agent)")
        else:
            yield path, key


@functools.lru_cache(maxsize=64)
def _load(path: str) -> Any:  # noqa: ANN401 - some kind of paramiko.PKey, or None if it cannot be used
    import paramiko

    try:
        return paramiko.PKey.from_path(path)
    except (paramiko.SSHException, OSError, ValueError, TypeError):
        return None


def _unknown_key(settings: SshSettings, key: paramiko.PKey) -> Refused:
    line = known_hosts.line(*settings.known_as, key.asbytes())
    shown = known_hosts.fingerprint(key.asbytes())
    file = settings.user_known_hosts[0] if settings.user_known_hosts else known_hosts.own_file()
    return Refused(
        HostState.HOST_KEY_UNKNOWN,
        "host key",
        f"its {key.get_name()} key is in no known_hosts file",
        hint="compare the fingerprint with the host's own, then add the line; or accept all unknown keys "
        "(never changed keys) with --accept-new",
        commands=(f"echo '{line}' >> {shlex.quote(file)}  # {shown}",),
        evidence=(f"{line.split(' ')[0]} presents {shown}",),
    )


def _changed_key(settings: SshSettings, verdict: Verdict, key: paramiko.PKey) -> Refused:
    name, port = settings.known_as
    entry = name if port == 22 else f"[{name}]:{port}"
    kind, shown = key.get_name(), known_hosts.fingerprint(key.asbytes())
    return Refused(
        HostState.HOST_KEY_CHANGED,
        "host key",
        f"its {kind} key is not the known key",
        hint="if the host was reinstalled, remove the old key; if not, this may be a man-in-the-middle attack",
        commands=(f"ssh-keygen -R {shlex.quote(entry)} -f {shlex.quote(verdict.file)}",),
        evidence=(f"it presents the {kind} key {shown}; see {verdict.file}, line {verdict.line}",),
    )


def _drop(transport: paramiko.Transport) -> None:
    """Close at once: paramiko's own thread notices only after up to 0.1 s."""
    with contextlib.suppress(OSError):
        if isinstance(transport.sock, socket.socket):
            transport.sock.shutdown(socket.SHUT_RDWR)
    transport.close()


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
