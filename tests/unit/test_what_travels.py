"""Code sent to nodes: includes all its imports, over the connection; a command line has the connect-back modules."""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import importlib
import json
import os
import py_compile
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from loops import each

from distdiag.agent import boot, connect_back, handshake, protocol, ranks
from distdiag.agent.agent import call
from distdiag.cluster import bootstrap, bundle
from distdiag.jobs.picture import Ask
from distdiag.jobs.sample_stacks import Sampled, Sampling

BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
"""Where a statement has others inside; an expression has none."""
ARGUMENT_BYTES = 128 * 1024  # MAX_ARG_STRLEN of Linux
COMMANDS = {
    "gpu-test": ("distdiag.launch.collect", "distdiag.commands.gpu_test.rank", "distdiag.agent.ranks"),
    "allreduce-bench": ("distdiag.launch.collect", "distdiag.commands.allreduce_bench.rank", "distdiag.agent.ranks"),
    "cuda-env": (
        "distdiag.commands.cuda_env.collect",
        "distdiag.commands.cuda_env.ask_torch",
        "distdiag.facts.cuda",
    ),
    "ports": ("distdiag.commands.ports.collect",),
    "core-bt": ("distdiag.commands.core_bt.collect",),
    "bundle": ("distdiag.commands.bundle.collect",),
    "doctor": ("distdiag.commands.doctor.collect", "distdiag.facts.cuda"),
    "hang": ("distdiag.jobs.picture",),
    "logs": ("distdiag.facts.logs.collect",),
    "trace-sys": ("distdiag.commands.trace.sys.collect",),
    "trace fds": ("distdiag.commands.trace.fds.collect",),
    "trace show": ("distdiag.commands.trace.show.collect",),
}


def test_the_argument_that_srun_is_given_has_only_what_connects_back() -> None:
    sources = bundle.sources(bundle.CONNECT_BACK)
    runs = {f"distdiag.agent.{name}" for name in ("boot", "connect_back", "handshake")}
    assert set(sources) == runs | {"distdiag.facts.machine", "distdiag.facts.text"}
    packed = boot.pack(sources, bundle.CONNECT_BACK, {"addresses": ["x" * 40] * 20})
    encoded = base64.b64encode(packed).decode()
    for needs_torch in (True, False):
        script = bootstrap.script([boot.ARGUMENT_START, encoded], python=None, setup=None, needs_torch=needs_torch)
        assert len(script) < ARGUMENT_BYTES / 4
        assert script.count(encoded) == 1


def test_the_imports_of_each_module_are_those_that_the_parser_of_python_finds() -> None:
    for path in sorted(Path(bundle.folder()).rglob("*.py")):
        text = path.read_text()
        all_imports, run = imports_in(ast.parse(text))
        assert set(bundle._imports_of(text)) == run, path
        assert set(bundle._imports_of(text.replace("TYPE_CHECKING", "ALWAYS"))) == all_imports | run, path


def imports_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the imports from distdiag in the statements under TYPE_CHECKING, and all others."""
    found: tuple[set[str], set[str]] = (set(), set())
    for statement in (one for name in BLOCKS for one in getattr(tree, name, ())):
        if isinstance(statement, ast.ImportFrom) and str(statement.module).partition(".")[0] == "distdiag":
            module = str(statement.module)
            names = {f"{module}.{alias.name}" for alias in statement.names}
            found[1].update(names if bundle._is_package(module) else {module})
        inner, run = imports_in(statement)
        is_for_checkers = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test)
        found[0].update(inner | run if is_for_checkers else inner)
        found[1].update(() if is_for_checkers else run)
    return found


def test_a_request_arrives_as_the_type_that_the_collect_module_declares() -> None:
    def more(ask: Ask, *others: object) -> tuple[object, ...]:
        return ask, *others

    sent = protocol.Collect(ask=Ask(["stacks"], 9.5, Sampling(samples=3, native=True), ranks=[(7, None)]))
    order = protocol.read_order(sent.to_json())
    assert isinstance(order, protocol.Collect)
    arrived, other = call(more, order.ask, "tell")
    assert [type(part) for part in (arrived, arrived.sampling, arrived.sampled)] == [Ask, Sampling, Sampled]
    assert protocol.Collect(ask=arrived).to_json() == sent.to_json()
    assert other == "tell"
    assert call(more, sent.ask) == (sent.ask,), "rank 0 of a launcher has its agent in its own process"
    assert call(lambda *others: others, None, "tell") == ("tell",)


@each("module", sorted({modules[0] for modules in COMMANDS.values()} | {"distdiag.facts.recorder.collect"}))
def test_the_type_that_a_collect_module_declares_is_known_on_the_node(module: str) -> None:
    collect = importlib.import_module(module)
    functions = [getattr(collect, name) for name in ("facts", "more") if hasattr(collect, name)]
    declared = [(function, function.__annotations__.get("ask")) for function in functions]
    known = [getattr(sys.modules[function.__module__], kind) for function, kind in declared if kind is not None]
    assert [kind for kind in known if isinstance(kind, type)] == known != []


def test_a_payload_of_any_size_travels_over_the_connection() -> None:
    """No feature may break it: here it is ten times what an argument may have."""
    noise = "".join(hashlib.sha256(bytes([number % 256, number >> 8])).hexdigest() for number in range(40_000))
    entry = "distdiag.tells_its_size"
    main = "def main(config, fd):\n    import os; os.write(fd, str(len(NOISE) + config['n']).encode())\n"
    text = f"NOISE = {noise!r}\n{main}"
    message = boot.pack_message({**bundle.sources(bundle.CONNECT_BACK), entry: text}, entry, {"n": 1})
    assert len(message) > 10 * ARGUMENT_BYTES
    assert answered(message, timeout_s=30) == (str(len(noise) + 1).encode(), b"")


@each(
    "message, why",
    [
        (b"%d\n" % (boot.MAX_PAYLOAD_BYTES + 1), b"invalid payload length"),
        (b"-1\n", b"invalid payload length"),
        (b"x" * 100, b"the length of the payload is missing"),
        (b"zwei\n", b"invalid literal"),
        (b"10\nhalf", b"the connection was closed"),
    ],
)
def test_what_is_no_payload_is_refused(message: bytes, why: bytes) -> None:
    answer, complaint = answered(message, timeout_s=10)
    assert answer == b""
    assert why in complaint


def answered(message: bytes, *, timeout_s: float) -> tuple[bytes, bytes]:
    """Act as the parent of one process that connects back; return its answer to a message, and its complaint."""
    key = handshake.new_key()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = {"addresses": ["127.0.0.1"], "port": listener.getsockname()[1], "find_s": timeout_s}
        packed = boot.pack(bundle.sources(bundle.CONNECT_BACK), bundle.CONNECT_BACK, config)
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", boot.ARGUMENT_START, base64.b64encode(packed).decode()],
            env={**os.environ, connect_back.NONCE: key},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        acceptor = handshake.Acceptor([listener], key)
        peers: list[handshake.Peer] = []
        while not peers:
            peers, _ = acceptor.wait(timeout_s)
        assert json.loads(peers[0].words)["name"]
        connection = peers[0].connection
        acceptor.close()
        with connection:
            connection.setblocking(True)
            connection.settimeout(timeout_s)
            assert connection.recv(len(connect_back.IN)) == connect_back.IN
            answer = b""
            with contextlib.suppress(OSError):  # the refusing peer may have hung up by now
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
        _, complaint = child.communicate(timeout=timeout_s)
    assert child.returncode == 0  # srun and mpirun would end the others for any other
    return answer, complaint


_IMPORTS = """
import builtins, functools, importlib, os, sys

builtins.compile = functools.cache(compile)  # each module once, for all commands that have it

def load(names):
    sys.meta_path.insert(0, CarriedFinder({name: sources[name] for name in names}))
    for name in names:
        importlib.import_module(name)

load(agent)
for name in sources:
    CarriedFinder(sources)._code(name)
out = os.dup(1)  # a module of cuda-env keeps the output of torch away from it
for command, names in commands.items():
    if os.fork() == 0:
        load(names)
        os.write(out, f"{command}\\n".encode())
        sys.exit()
    assert os.wait()[1] == 0, command
"""


def test_what_travels_imports_nothing_that_does_not() -> None:
    agent, commands = [*bundle.sources(bundle.AGENT)], dict[str, list[str]]()
    sources = dict[str, str]()
    for command, modules in COMMANDS.items():
        carried = bundle.sources(bundle.AGENT, *modules)
        commands[command] = [*carried]
        sources |= carried
    order = f"exec({sources['distdiag.agent.boot']!r}, globals())\n{sources=}\n{agent=}\n{commands=}\n{_IMPORTS}"
    # Imported one by one where there is no distdiag: -S leaves the site-packages out, and -P the working directory.
    # Each command in a process of its own, which already has the agent's modules, as on a node.
    done = subprocess.run([sys.executable, "-S", "-P", "-"], input=order, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.split("\n")) == (0, "", [*COMMANDS, ""])


@pytest.mark.parametrize("command", ["gpu_test", "gpu_test.isolate", "allreduce_bench"])
def test_what_a_rank_carries_is_whole_and_fits_into_a_pipe(command: str) -> None:
    entry = f"distdiag.commands.{command}.rank"
    carried = ranks.carried_by_ranks(
        bundle.sources(bundle.AGENT, "distdiag.launch.collect", entry, "distdiag.agent.ranks")
    )
    starts = "distdiag.starts"
    packed = boot.pack({**carried, starts: f"def main(config):\n    import {entry}\n    print('loaded')\n"}, starts, {})
    assert len(packed) < 65536  # what a pipe of Linux holds
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", boot.START, str(len(packed))], input=packed, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"loaded\n", b"")


def test_what_takes_long_to_import_is_not_needed_before_there_are_orders() -> None:
    sources = bundle.sources(bundle.AGENT, bundle.CONNECT_BACK, *COMMANDS["gpu-test"])
    order = (
        f"exec({sources['distdiag.agent.boot']!r}, globals())\n"
        f"sys.meta_path.insert(0, CarriedFinder({sources!r}))\n"
        "from distdiag.agent import connect_back, handshake, host_info\n"
        "from distdiag.launch import collect\n"
        "handshake.Handshake('key'), host_info.hello(), collect.facts(collect.Ask(gpus=False))\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-S", "-"], input=order, capture_output=True, text=True, check=True)
    # hashlib is needed: an agent that calls home proves that it knows the key.
    slow = {"dataclasses", "inspect", "typing", "base64", "contextlib", "shutil", "subprocess"}
    assert not slow & set(done.stdout.split())


def test_on_this_machine_modules_come_from_where_they_are_installed(tmp_path: Path) -> None:
    names = ("distdiag.a", "distdiag.b.c", "distdiag.d")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "__init__.py").write_text("raise RuntimeError('packages are empty')")
    for name in names:
        path = tmp_path.joinpath(*name.split(".")[1:]).with_suffix(".py")
        path.write_text(f"WHO = {name!r}, 'installed'\n")
    kept = Path(py_compile.compile(str(tmp_path / "d.py"), doraise=True) or "")
    kept.write_bytes(kept.read_bytes()[:30])  # a disk was full
    order = (
        f"import importlib.util, sys\nfrom distdiag.agent.boot import CarriedFinder\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'distdiag']: del sys.modules[name]\n"
        f"sys.meta_path.insert(0, CarriedFinder({{}}, {str(tmp_path)!r}))\n"
        f"for name in {names!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    print(*module.WHO, module.__file__, module.__loader__.get_source(name).count('installed'))\n"
        "print(importlib.util.find_spec('distdiag.e'))\n"
    )
    done = subprocess.run([sys.executable, "-c", order], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"distdiag.a installed {tmp_path}/a.py 1",
        f"distdiag.b.c installed {tmp_path}/b/c.py 1",
        f"distdiag.d installed {tmp_path}/d.py 1",
        "None",
    ]
