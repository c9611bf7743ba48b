"""`python -m distdiag`, and the command `distdiag`."""

from __future__ import annotations

import gc
import sys

from distdiag import interrupts


def main() -> None:
    """Run distdiag; an interrupt while loading is held until the command can handle it."""
    interrupts.handle(hold=True)
    gc.set_threshold(50_000)  # loading makes many objects and no garbage
    from distdiag.cli import main as run

    try:
        try:
            run()
        finally:
            interrupts.finish()  # output is complete: a later signal would only change the status
            gc.freeze()  # spares the collection at exit, 20 ms
    except KeyboardInterrupt:  # right after the report, before it was ignored
        interrupts.finish()
        sys.exit(130)


if __name__ == "__main__":
    main()
