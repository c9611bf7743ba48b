"""Every finding id that code makes: its levels and its meaning, declared once. An id never changes its meaning.

Texts in knowledge/*.toml declare the ids of their rows; distdiag/diagnosis/finding_ids.py lists both.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

RowId = NewType("RowId", str)
"""An id declared by a row of knowledge/*.toml, or by Shared for one of its commands."""
_RANKS = "gpu-test allreduce-bench"
_PATHS = "gpu-test allreduce-bench ports"
_NODES = "gpu-test allreduce-bench ports doctor"


class Shared(StrEnum):
    """Ids of several commands, after the command's name: levels, meaning, commands."""

    levels: str
    means: str
    commands: str

    def __new__(cls, id_: str, levels: str = "", means: str = "", commands: str = _RANKS) -> Shared:
        """Return the member of a declaration."""
        member = str.__new__(cls, id_)
        member._value_ = id_
        member.levels, member.means, member.commands = levels, means, commands
        return member

    def of(self, command: str) -> RowId:
        """Return the id in the findings of a command."""
        return RowId(f"{command}.{self}")

    # fmt: off
    ADDRESS_LOOPBACK = "address-loopback", "fail warn", "an address leads back to the machine that connects", _NODES
    ADDRESS_UNRESOLVED = "address-unresolved", "fail", "an address does not resolve", _NODES
    ALL_BUSY = "all-busy", "fail unknown", "all ranks are still busy in one stage: no progress"
    ALL_WAITING = "all-waiting", "fail unknown", "all ranks are waiting in one stage: no progress"
    ALONE = "alone", "info", "a collective needs a second rank: not measured", "allreduce-bench"
    BAD_LINK = "bad-link", "fail", "--isolate: a link between two ranks or nodes is slow or broken", "gpu-test"
    BAD_NODE = "bad-node", "fail", "--isolate: a node is slow or broken", "gpu-test"
    BAD_RANK = "bad-rank", "fail", "--isolate: a rank, with its GPU, is slow or broken", "gpu-test"
    CPU_ONLY = "cpu-only", "info", "no GPU is visible: tested gloo on the CPU, not GPUs or NCCL"
    INJECTED = "injected", "info", "a fault was injected (--inject)"
    NODES_DIFFER = "nodes-differ", "info warn", "nodes or their environments differ"
    NOTHING_MEASURED = "nothing-measured", "unknown", "nothing could be measured", "allreduce-bench"
    PATH_BROKEN = "path-broken", "fail", "a path: connected, then the connection is cut", _PATHS
    PATH_CUT_OFF = "path-cut-off", "fail", "a path: data stops midway", _PATHS
    PATH_FILTERED = "path-filtered", "fail", "a path: no answer: packets are dropped", _PATHS
    PATH_NO_PORT = "path-no-port", "fail", "a path: no free local port", _PATHS
    PATH_NO_ROUTE = "path-no-route", "fail", "a path: the node's own kernel has no route", _PATHS
    PATH_REFUSED = "path-refused", "fail", "a path: a firewall resets connections", _PATHS
    PATH_REJECTED = "path-rejected", "fail", "a path: connections are rejected", _PATHS
    PATH_SILENT = "path-silent", "fail", "a path: connected, then no data comes through", _PATHS
    PORT_BROKEN = "port-broken", "fail", "a requested port: connected, then the connection is cut", _PATHS
    PORT_CUT_OFF = "port-cut-off", "fail", "a requested port: data stops midway", _PATHS
    PORT_FILTERED = "port-filtered", "fail", "a requested port: no answer: packets are dropped", _PATHS
    PORT_NO_PORT = "port-no-port", "fail", "a requested port: no free local port", _PATHS
    PORT_NO_ROUTE = "port-no-route", "fail", "a requested port: the node's own kernel has no route", _PATHS
    PORT_REFUSED = "port-refused", "fail", "a requested port: a firewall resets connections", _PATHS
    PORT_REJECTED = "port-rejected", "fail", "a requested port: connections are rejected", _PATHS
    PORT_SILENT = "port-silent", "fail", "a requested port: connected, then no data comes through", _PATHS
    RANK_MISSING = "rank-missing", "fail unknown", "a rank never connected, or made no progress"
    RANK_PORTS_BROKEN = "rank-ports-broken", "fail", "the ephemeral ports of ranks: connected, then the connection is cut", _NODES
    RANK_PORTS_CUT_OFF = "rank-ports-cut-off", "fail", "the ephemeral ports of ranks: data stops midway", _NODES
    RANK_PORTS_FILTERED = "rank-ports-filtered", "fail", "the ephemeral ports of ranks: no answer: packets are dropped", _NODES
    RANK_PORTS_NO_PORT = "rank-ports-no-port", "fail", "the ephemeral ports of ranks: no free local port", _NODES
    RANK_PORTS_NO_ROUTE = "rank-ports-no-route", "fail", "the ephemeral ports of ranks: the node's own kernel has no route", _NODES
    RANK_PORTS_REFUSED = "rank-ports-refused", "fail", "the ephemeral ports of ranks: a firewall resets connections", _NODES
    RANK_PORTS_REJECTED = "rank-ports-rejected", "fail", "the ephemeral ports of ranks: connections are rejected", _NODES
    RANK_PORTS_SILENT = "rank-ports-silent", "fail", "the ephemeral ports of ranks: connected, then no data comes through", _NODES
    SEVERAL = "several", "fail", "--isolate: several independent faults", "gpu-test"
    SINGLE_RANK = "single-rank", "info", "a single rank: nothing was sent, so links between GPUs were not tested"
    SPLIT = "split", "fail", "--isolate: groups of ranks that work inside and not across", "gpu-test"
    TOO_LARGE = "too-large", "info", "a row does not fit into the memory: not measured", "allreduce-bench"
    UNDECIDABLE = "undecidable", "fail unknown", "--isolate: the pairs do not decide what is at fault", "gpu-test"
    UNIFORMLY_SLOW = "uniformly-slow", "fail", "--isolate: all pairs are slower than this hardware should be", "gpu-test"
    UNSUPPORTED = "unsupported", "warn", "a backend lacks a collective: not measured", "allreduce-bench"


class Id(StrEnum):
    """Ids of one command: levels, meaning."""

    levels: str
    means: str

    def __new__(cls, id_: str, levels: str = "", means: str = "") -> Id:
        """Return the member of a declaration."""
        member = str.__new__(cls, id_)
        member._value_ = id_
        member.levels, member.means = levels, means
        return member

    # fmt: off
    CORE_BT_CONSEQUENCE = "core-bt.consequence", "fail", "a crash that follows from another rank's failure"
    CORE_BT_CRASH = "core-bt.crash", "fail", "a crash: the signal, the thread, its frames and the reason"
    DISTDIAG_BUG = "distdiag.bug", "unknown", "a bug in distdiag"
    DISTDIAG_FACTS_FAILED = "distdiag.facts-failed", "unknown", "the node side of distdiag failed"
    DISTDIAG_FAILED = "distdiag.failed", "unknown", "the command could not be carried out"
    DISTDIAG_NOT_SAVED = "distdiag.not-saved", "unknown", "the facts could not be saved (--save)"
    DISTDIAG_SCARCE = "scarce", "unknown", "this machine lacks memory, disk space or processes for distdiag"
    HANG_BEHIND = "hang.behind", "fail warn", "all ranks wait in one collective, and the loop counters of some are behind"
    HANG_BUSY_RANK = "hang.busy-rank", "warn", "a rank works outside of the collective while the others wait"
    HANG_COMPILE = "hang.compile", "warn", "a rank compiles while the others wait"
    HANG_DATA_LOADING = "hang.data-loading", "fail", "a rank waits for its data"
    HANG_DEADLOCK = "hang.deadlock", "fail", "ranks wait for each other"
    HANG_DEBUGGER = "hang.debugger", "fail", "a rank is in a debugger"
    HANG_DEVICE_STUCK = "hang.device-stuck", "fail", "a rank waits for a GPU or its driver, which does not answer"
    HANG_DIFFERENT_COLLECTIVES = "hang.different-collectives", "fail warn", "a rank waits in another collective than the others"
    HANG_ELASTIC_RESTART = "hang.elastic-restart", "fail unknown", "the ranks are started again, or again and again"
    HANG_EXITED = "hang.exited", "fail", "a rank exited while the others wait for it"
    HANG_LOCK = "hang.lock", "fail info", "a rank waits for a lock, or another process holds the lock that it waits for"
    HANG_NETWORK = "hang.network", "fail", "the network loses data, or no rank is at fault"
    HANG_NOT_HUNG = "hang.not-hung", "info", "ranks made progress between the samples"
    HANG_NOT_IN_COLLECTIVE = "hang.not-in-collective", "fail", "a rank is outside of the collective in which the others wait, and does not move"
    HANG_NO_JOB = "hang.no-job", "unknown", "no rank was found"
    HANG_OUTSIDE_THE_JOB = "hang.outside-the-job", "unknown", "all collectives have ended, and no rank moves"
    HANG_PROCESS = "hang.process", "unknown", "a process of no job, and what it waits for"
    HANG_RENDEZVOUS = "hang.rendezvous", "fail warn", "ranks wait in init_process_group, or launchers for each other"
    HANG_SIZE_MISMATCH = "hang.size-mismatch", "fail", "ranks call a collective with different sizes or dtypes"
    HANG_SLOW = "hang.slow", "warn", "a rank is outside of the collective, and the others have not waited for long"
    HANG_STOPPED = "hang.stopped", "fail", "a rank is stopped: by a signal, a debugger or a frozen cgroup"
    HANG_STORAGE = "hang.storage", "fail", "a rank waits for a file system that does not answer"
    HANG_UNKNOWN = "hang.unknown", "unknown", "the sources do not decide, or disagree; the fix has the command that decides"
    HANG_UNREADABLE = "hang.unreadable", "unknown", "a process cannot be read: permission denied"
    HOSTS_AUTH = "hosts.auth", "unknown", "a host refused the login"
    HOSTS_CANCELLED = "hosts.cancelled", "unknown", "a host was not reached before the command ended"
    HOSTS_DUPLICATE = "hosts.duplicate", "info", "a host is listed more than once, used once"
    HOSTS_FAILED = "hosts.failed", "unknown", "the command on a host failed"
    HOSTS_FILTERED = "hosts.filtered", "unknown", "a host does not answer on the ssh port"
    HOSTS_HOST_KEY_CHANGED = "hosts.host-key-changed", "unknown", "the ssh key of a host has changed"
    HOSTS_HOST_KEY_REVOKED = "hosts.host-key-revoked", "unknown", "the ssh key of a host is revoked"
    HOSTS_HOST_KEY_UNKNOWN = "hosts.host-key-unknown", "unknown", "the ssh key of a host is not known"
    HOSTS_KILLED = "hosts.killed", "unknown", "the agent on a host was killed"
    HOSTS_LOST = "hosts.lost", "unknown", "the connection to a host was lost"
    HOSTS_NOT_RUNNING = "hosts.not-running", "unknown", "a pod or task is not running"
    HOSTS_NOT_SSH = "hosts.not-ssh", "unknown", "another program answers on the ssh port of a host"
    HOSTS_NO_PYTHON = "hosts.no-python", "unknown", "a host has no usable Python"
    HOSTS_NO_ROUTE = "hosts.no-route", "unknown", "no route to a host"
    HOSTS_PROTOCOL_ERROR = "hosts.protocol-error", "unknown", "a host sent an invalid answer"
    HOSTS_REFUSED = "hosts.refused", "unknown", "a host refuses connections to the ssh port"
    HOSTS_SAME_MACHINE = "hosts.same-machine", "warn", "two hosts of the list are one machine; tested once"
    HOSTS_TIMEOUT = "hosts.timeout", "unknown", "a host did not answer in time"
    HOSTS_UNKNOWN_NAME = "hosts.unknown-name", "unknown", "the name of a host does not resolve"
    INTERRUPTED = "interrupted", "unknown", "Ctrl-C before any result"
    KUBE_CONTAINER_FAILED = "kube.container-failed", "fail warn", "a container of a pod failed"
    KUBE_EVICTED = "kube.evicted", "fail warn", "a pod was evicted"
    KUBE_NOT_STARTED = "kube.not-started", "fail warn", "a pod has not started"
    KUBE_OOM_KILLED = "kube.oom-killed", "fail warn", "a container was killed: out of memory"
    KUBE_STATES_NOT_READ = "kube.states-not-read", "warn", "restarts and last states of the pods could not be read"
    LOGS_FAILURE = "logs.failure", "fail", "a failure of an unknown rank"
    LOGS_FIRST_FAILURE = "logs.first-failure", "fail", "the rank that failed first, and why"
    LOGS_SAME_FAILURE = "logs.same-failure", "fail", "several ranks failed alike"
    OVERFLOW_DETECTED = "overflow.detected", "fail", "a module produced nan or inf"
    OVERFLOW_ENDED_EARLY = "overflow.ended-early", "unknown", "processes ended before they reported their results"
    OVERFLOW_GAVE_UP = "overflow.gave-up", "unknown", "the detector of a model stopped"
    OVERFLOW_INCOMPLETE = "overflow.incomplete", "warn", "frames are missing or truncated"
    OVERFLOW_JOB_ENDED = "overflow.job-ended", "info unknown", "the job exited, or was stopped by --abort-after"
    OVERFLOW_NEAR_LIMIT = "overflow.near-limit", "warn", "numbers come close to the maximum of the dtype"
    OVERFLOW_NOTHING_WATCHED = "overflow.nothing-watched", "unknown", "no torch model ran a forward pass"
    OVERFLOW_NOT_FINITE = "overflow.not-finite", "warn", "nan or inf in a frame, not reported by the detector"
    OVERFLOW_NOT_WATCHED = "overflow.not-watched", "unknown", "part of the job was not checked"
    OVERFLOW_NO_FRAMES = "overflow.no-frames", "unknown", "no frames were found"
    OVERFLOW_OUTPUTS_UNREADABLE = "overflow.outputs-unreadable", "unknown warn", "the output of a model cannot be read"
    OVERFLOW_UNREADABLE = "overflow.unreadable", "unknown", "a file could not be read"
    OVERFLOW_WARNING = "overflow.warning", "warn", "a warning of the detector"
    PYSPY_ALL_STRAGGLER = "pyspy-all.straggler", "warn", "a rank is slower than the others"
    SYNC_CHECK_BATCHNORM_STATISTICS = "sync-check.batchnorm-statistics", "info", "each rank keeps BatchNorm statistics of its own batches"
    SYNC_CHECK_OUT_OF_SYNC = "sync-check.out-of-sync", "fail", "a value differs between ranks, or is missing on a rank"
    SYNC_CHECK_RANKS_MISSING = "sync-check.ranks-missing", "unknown", "files of some ranks are missing"
    SYNC_CHECK_STALE_FILES = "sync-check.stale-files", "info", "files of an earlier run were left out"
    TRACE_BLOCKED = "trace.blocked", "fail warn", "a rank is blocked, and on what"
    TRACE_CLOSE_WAIT = "trace.close-wait", "warn", "many connections in CLOSE_WAIT: the peer has closed them, this process has not"
    TRACE_DELETED_FILES = "trace.deleted-files", "warn", "deleted files that are open still use disk space"
    TRACE_ELSEWHERE = "trace.elsewhere", "fail", "a rank waits for something outside of the job"
    TRACE_EXITED = "trace.exited", "fail unknown", "a rank or process has exited"
    TRACE_EXITED_FIRST = "trace.exited-first", "fail", "a rank exited before the others"
    TRACE_FD_LIMIT = "trace.fd-limit", "warn", "a process uses most of its descriptors (ulimit -n)"
    TRACE_INCOMPLETE = "trace.incomplete", "unknown", "a node sent incomplete facts"
    TRACE_LAST_LINE = "trace.last-line", "fail unknown", "the last line that a rank executed"
    TRACE_NO_ANSWER = "trace.no-answer", "unknown", "a node did not answer in time"
    TRACE_NO_LINES = "trace.no-lines", "unknown", "no line of a rank was recorded: it did not reach traced code"
    TRACE_NO_RECORDING = "trace.no-recording", "unknown", "no recorded lines were found"
    TRACE_OTHER_USER = "trace.other-user", "warn", "a process of another user, whose state cannot be read"
    TRACE_SAME_PLACE = "trace.same-place", "unknown", "the last lines cannot decide: all ranks are at one place"
    TRACE_STORAGE = "trace.storage", "warn", "descriptors on a file system that does not answer"
    TRACE_STRAGGLER = "trace.straggler", "warn", "a rank works while the others wait"
    TRACE_STUCK_RANK = "trace.stuck-rank", "fail", "a rank is outside of the collectives in which the others wait"
    TRACE_THREADS_NOT_RECORDED = "trace.threads-not-recorded", "info", "threads beyond trace py --max-threads were not recorded"
    TRACE_UNDECIDED = "trace.undecided", "unknown", "the last lines cannot decide which rank is stuck"
    TRACE_UNREAD = "trace.unread", "unknown", "a file could not be read"
    TRACE_UNREADABLE = "trace.unreadable", "unknown", "descriptors of a process cannot be read: permission denied"
    TRACE_UNSEEN = "trace.unseen", "warn", "ranks without recorded lines: on other nodes, or not traced"
    USAGE = "usage", "unknown", "the command line is wrong"


FindingId = Id | RowId
