"""The result of every requested host: one row each, whatever happened."""

from __future__ import annotations

from enum import StrEnum

from distdiag.record import record


class HostState(StrEnum):
    """How far a host was reached, or why it was not. Reaching it and running there fail separately."""

    OK = "ok"
    UNKNOWN_NAME = "unknown-name"
    FILTERED = "filtered"
    REFUSED = "refused"
    NO_ROUTE = "no-route"
    NOT_SSH = "not-ssh"
    HOST_KEY_UNKNOWN = "host-key-unknown"
    HOST_KEY_CHANGED = "host-key-changed"
    HOST_KEY_REVOKED = "host-key-revoked"
    AUTH = "auth"
    NOT_RUNNING = "not-running"
    NO_PYTHON = "no-python"
    TIMEOUT = "timeout"
    PROTOCOL_ERROR = "protocol-error"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"
    CANCELLED = "cancelled"


@record(kw_only=True)
class HostError:
    """Why a host could not be used: stage, message, and hint."""

    state: HostState
    stage: str
    message: str
    hint: str = ""
    commands: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


@record(kw_only=True)
class HostResult:
    """One requested host. `seconds` until its facts arrived or it was given up."""

    host: str
    state: HostState
    stage: str
    message: str
    seconds: float
