"""Python runs this at its start when `distdiag overflow` has put its directory into PYTHONPATH.

It waits for torch to be imported, takes itself out of the way, and runs the sitecustomize that would have run before.
"""

import sys


def _main() -> None:
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    _run_the_next()
    # The interpreter may be another one than distdiag's own: what is needed of it comes from the same place as this.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(here))))
    sys.path.insert(0, root)
    try:
        from distdiag.training.overflow import session
    finally:
        sys.path.remove(root)
    session.begin_from_environment(root)


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
    sys.stderr.write(f"distdiag overflow: this process is not watched: {type(error).__name__} {error}\n")
