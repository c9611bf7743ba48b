"""Selects the code to trace: the user's own by default, packages and the standard library on request."""

from __future__ import annotations

import os
import site
import sys
import sysconfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGES = ("site-packages", "dist-packages")
_GENERATED = "__create_fn__"
"""Name of functions that dataclasses generate, without a file, in the module of the class."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


class CodeFilter:
    """Decides by the file that code was compiled from."""

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        paths = sysconfig.get_paths()
        self._stdlib = tuple({os.path.join(paths[name], "") for name in ("stdlib", "platstdlib")})
        places = {paths["purelib"], paths["platlib"], site.getusersitepackages()}
        self._sites = tuple(sorted((os.path.join(place, "") for place in places), key=len, reverse=True))
        self._include = tuple(include)
        self._exclude = tuple(exclude)
        self._modules = tuple(name for name in include if name.partition(".")[0] in sys.stdlib_module_names)

    def kind_of(self, file: str, function: str = "", module: str = "") -> str | None:
        """Classify code by its file: "user", "library" or "stdlib"; None if not traced.

        Code without a file is classified as the module that executes it.
        """
        if file.startswith(("<frozen ", _OURS)):
            return None
        if file.startswith("<"):
            return self._kind_of_made_up(function, module)
        below = self._below_site(file)
        if below is not None:
            return "library" if self._is_in(below, self._include) and not self._is_in(below, self._exclude) else None
        if file.startswith(self._stdlib):
            return "stdlib" if self._takes_stdlib(file) else None
        own = os.path.abspath(file)
        return None if any(self._is_below(own, name) for name in self._exclude) else "user"

    def _takes_stdlib(self, file: str) -> bool:
        """Return whether this module, or the whole standard library, was included by name."""
        if "stdlib" not in self._include and not self._modules:
            return False
        home = next(place for place in self._stdlib if file.startswith(place))
        below = file[len(home) :]
        named = "stdlib" in self._include or self._is_in(below, self._modules)
        return named and not self._is_in(below, self._exclude)

    def _kind_of_made_up(self, function: str, module: str) -> str | None:
        if function.startswith(_GENERATED) or module.startswith("namedtuple_"):
            return None
        home = getattr(sys.modules.get(module), "__file__", None)
        return "user" if not home or module == "__main__" else self.kind_of(home)

    def _below_site(self, file: str) -> str | None:
        """Return the path of a package's file relative to its site directory; None for other files."""
        for place in self._sites:
            if file.startswith(place):
                return file[len(place) :]
        parts = file.split(os.sep)
        for name in _PACKAGES:
            if name in parts:
                return os.sep.join(parts[parts.index(name) + 1 :])
        return None

    def _is_in(self, below: str, wanted: Sequence[str]) -> bool:
        paths = [name.replace(".", os.sep) for name in wanted]
        return "all" in wanted or any(below.startswith(path + os.sep) or below == path + ".py" for path in paths)

    def _is_below(self, file: str, wanted: str) -> bool:
        """Return whether a user's file matches `wanted`: a directory, a file, or a package."""
        if os.sep in wanted:
            named = os.path.abspath(wanted)
            return file == named or file.startswith(named + os.sep)
        path = os.sep + wanted.replace(".", os.sep)
        return path + os.sep in file or file.endswith(path + ".py")
