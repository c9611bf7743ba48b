"""Python runs this at its start when `distdiag run`, `trace py` or `overflow` has put its directory into PYTHONPATH.

It takes itself out of the way, runs the sitecustomize that would have run without it, and starts what was asked for.
"""

import sys

_ASKED = (
    ("DISTDIAG_RUN", "distdiag.training.recorded_output", "run: the output of this process is not kept"),
    ("DISTDIAG_LINES", "distdiag.training.line_trace.session", "trace: this process is not traced"),
    ("DISTDIAG_OVERFLOW", "distdiag.training.overflow.session", "overflow: this process is not checked"),
)
"""The variable that asks for it, the module that does it, and what is to be said if it cannot.

`run` is first: it sets the variables of the others in the ranks of --rank.
"""


def _main() -> None:
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    _run_the_next()
    for variable, module, complaint in _ASKED:
        if os.environ.get(variable):
            try:
                _begin(module, os.path.dirname(os.path.dirname(os.path.dirname(here))))
            except Exception as error:  # noqa: BLE001 - the job is what matters
                sys.stderr.write(f"distdiag {complaint}: {type(error).__name__} {error}\n")


def _begin(module: str, root: str) -> None:
    """Start what lies below `root`: this interpreter may be another one than distdiag's own, and not know of it."""
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
except Exception as error:  # noqa: BLE001 - the job is what matters
    sys.stderr.write(f"distdiag: this process is not traced or checked: {type(error).__name__} {error}\n")
