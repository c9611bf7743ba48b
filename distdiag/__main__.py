"""`python -m distdiag`, and the command `distdiag`."""

from __future__ import annotations

import gc
import sys

from distdiag import interrupts


def main() -> None:
    """Run distdiag; an interrupt that comes while it loads is kept until it is known what it interrupts."""
    interrupts.handle(hold=True)
    gc.set_threshold(50_000)  # loading makes many objects and no garbage
    from distdiag.cli import main as run

    try:
        try:
            run()
        finally:
            interrupts.finish()  # all is said: a signal that comes now would only change the status
            gc.freeze()  # nobody needs what is left; to look through all of it at the end takes 20 ms
    except KeyboardInterrupt:  # right after the report, before it was ignored
        interrupts.finish()
        sys.exit(130)


if __name__ == "__main__":
    main()
