"""`each`: a table of cases in one test, for cases that cost less than pytest does for a test of their own."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def each(names: str, cases: Iterable[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for every case, as pytest.mark.parametrize does, but as one test; a failure names its case.

    `names`: the arguments, separated by commas; with several, a case is a sequence of their values. The cases share
    the fixtures, so a test that changes one, or may skip, is not for it.
    """
    wanted = [name.strip() for name in names.split(",")]
    rows = [dict(zip(wanted, case if len(wanted) > 1 else (case,), strict=True)) for case in cases]  # type: ignore[call-overload]
    assert rows

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: object) -> None:
            for row in rows:
                try:
                    test(**fixtures, **row)
                except BaseException as error:
                    error.add_note(f"in the case {row!r}"[:300])
                    raise

        own = inspect.signature(test)
        kept = [parameter for parameter in own.parameters.values() if parameter.name not in wanted]
        run.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
