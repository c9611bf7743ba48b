"""What is sent to the nodes: all that it imports, and not more than a command line takes."""

from __future__ import annotations

import ast
import base64
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.cluster import bootstrap, bundle
from distdiag.node import boot

ARGUMENT_BYTES = 128 * 1024  # MAX_ARG_STRLEN of Linux
COMMANDS = {
    "gpu-test": ("distdiag.workload.collect", "distdiag.commands.gpu_test.rank", "distdiag.node.ranks"),
    "allreduce-bench": ("distdiag.workload.collect", "distdiag.commands.allreduce_bench.rank", "distdiag.node.ranks"),
    "cuda-env": (
        "distdiag.commands.cuda_env.collect",
        "distdiag.commands.cuda_env.ask_torch",
        "distdiag.node.cuda",
    ),
    "ports": ("distdiag.commands.ports.collect",),
    "core-bt": ("distdiag.commands.core_bt.collect",),
    "pyspy-all": ("distdiag.commands.pyspy_all.collect",),
    "trace-sys": ("distdiag.commands.trace.sys.collect",),
    "trace blocked": ("distdiag.commands.trace.blocked.collect",),
    "trace fds": ("distdiag.commands.trace.fds.collect",),
    "trace show": ("distdiag.commands.trace.show.collect",),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_payload_fits_into_the_argument_that_srun_is_given(command: str) -> None:
    packed = boot.pack(bundle.sources(*COMMANDS[command]), "distdiag.node.call_home", {"hosts": "x" * 500})
    encoded = base64.b64encode(packed).decode()
    for needs_torch in (True, False):
        script = bootstrap.script([boot.ARGUMENT_START, encoded], python=None, setup=None, needs_torch=needs_torch)
        assert len(script) < 0.75 * ARGUMENT_BYTES, "the next feature would not fit"
        assert script.count(encoded) == 1


def test_what_travels_lacks_docstrings_and_nothing_else() -> None:
    package = Path(boot.__file__).parents[1]
    shorter = 0
    for path in package.rglob("*.py"):
        if path.name != "__init__.py":
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            original, text = path.read_text(), bundle.only(name)[name]
            assert text.count("\n") == original.count("\n")
            assert without_docstrings(text) == without_docstrings(original), name
            shorter += len(original) - len(text)
    assert shorter > 200_000


def without_docstrings(text: str) -> tuple[str, list[int]]:
    """Write a module as Python understands it, and the numbers of its lines."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.If)):
            node.body = [one for one in node.body if not is_text(one)]
    return ast.dump(tree), [node.lineno for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr))]


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_travels_imports_nothing_that_does_not(command: str) -> None:
    sources = bundle.sources(*COMMANDS[command])
    # Imported one by one where there is no distdiag: -S leaves the site-packages out, and -P the working directory.
    load = "import importlib, sys\nfor name in sys.argv[1].split(): importlib.import_module(name)\n"
    start = f"sys.argv[1] = {' '.join(sources)!r}\n{load}"
    order = (
        "import sys\n"
        f"sources = {sources!r}\n"
        f"exec(sources['distdiag.node.boot'], globals())\n"
        "sys.meta_path.insert(0, CarriedFinder(sources))\n"
        f"sys.argv[1:] = ['']\n{start}"
    )
    done = subprocess.run([sys.executable, "-S", "-P", "-"], input=order, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_an_agent_imports_first_is_known(command: str) -> None:
    collect = COMMANDS[command][0]
    sources = bundle.sources(*COMMANDS[command])
    order = (
        f"import sys; sys.path.insert(0, {str(Path(bundle.folder()).parent)!r})\n"
        f"import distdiag.node.call_home, {collect}\n"
        "print(*(name for name, module in sys.modules.items() if name.startswith('distdiag') and module.__file__))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", order], capture_output=True, text=True, check=True)
    imported = {name for name in done.stdout.split() if name in sources}
    assert set(bundle.first(sources, "distdiag.node.call_home", collect)) == imported


def test_what_takes_long_to_import_is_not_needed_before_there_are_orders() -> None:
    sources = bundle.sources(*COMMANDS["gpu-test"])
    order = (
        f"exec({sources['distdiag.node.boot']!r}, globals())\n"
        f"sys.meta_path.insert(0, CarriedFinder({sources!r}))\n"
        "from distdiag.node import call_home, handshake, hello\n"
        "from distdiag.workload import collect\n"
        "handshake.Handshake('key'), hello.who_is_here(), collect.facts({'gpus': False})\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-S", "-"], input=order, capture_output=True, text=True, check=True)
    # hashlib is needed: an agent that calls home proves that it knows the key.
    slow = {"dataclasses", "inspect", "typing", "base64", "contextlib", "shutil", "subprocess"}
    assert not slow & set(done.stdout.split())


def test_what_came_compiled_is_used_and_what_did_not_is_compiled_here() -> None:
    sources = {"distdiag.a": "WHO = 'source'\n", "distdiag.b": "WHO = 'source'\n"}
    order = (
        "import importlib, sys\nfrom distdiag.node.boot import CarriedFinder\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'distdiag']: del sys.modules[name]\n"
        "codes = {'distdiag.a': compile('WHO = 0', 'a', 'exec')}\n"
        f"sys.meta_path.insert(0, CarriedFinder({sources!r}, '', codes))\n"
        "print(*(importlib.import_module(name).WHO for name in ('distdiag.a', 'distdiag.b')))\n"
    )
    done = subprocess.run([sys.executable, "-c", order], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "source"]


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
        f"import importlib.util, sys\nfrom distdiag.node.boot import CarriedFinder\n"
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
