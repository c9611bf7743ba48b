"""Executed at Python startup: `distdiag run`, `trace py` or `overflow` put its directory into PYTHONPATH.

It removes itself from sys.path, runs the sitecustomize that it shadowed, and starts the requested tool.
"""

import sys

_ASKED = (
    ("DISTDIAG_RUN", "distdiag.training.recorded_output", "run: the output of this process is not kept"),
    ("DISTDIAG_LINES", "distdiag.training.line_trace.session", "trace: this process is not traced"),
    ("DISTDIAG_OVERFLOW", "distdiag.training.overflow.session", "overflow: this process is not checked"),
)
"""Environment variable, module to start, and error message. `run` is first: in the ranks of --rank it sets the
variables of the others."""


def _main() -> None:
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    _run_the_next()
    for variable, module, complaint in _ASKED:
        if os.environ.get(variable):
            try:
                _begin(module, os.path.dirname(os.path.dirname(os.path.dirname(here))))
            except Exception as error:  # noqa: BLE001 - never fail the job
                sys.stderr.write(f"distdiag {complaint}: {type(error).__name__} {error}\n")


def _begin(module: str, root: str) -> None:
    """Start a module below `root`: this may be another interpreter, without distdiag installed."""
    from importlib import import_module

    sys.path.insert(0, root)
    try:
        session = import_module(module)
    finally:
        sys.path.remove(root)
    session.begin_from_environment()


def _run_the_next() -> None:
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine


try:
    _main()
except Exception as error:  # noqa: BLE001 - never fail the job
    sys.stderr.write(f"distdiag: this process is not traced or checked: {type(error).__name__} {error}\n")
