"""Run by each Python of a test run as it starts: torch costs less to import and to leave, and sent modules to compile.

Make copies it beside the installed packages, where a .pth file imports it.
"""

from __future__ import annotations

import _imp
import atexit
import builtins
import gc
import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from typing import Any

_KERNELS = "torch._meta_registrations"


class _Later(ModuleType):
    """A module that is run when something is missing in it."""

    def __init__(self, name: str, loader: Loader) -> None:
        super().__init__(name)
        self.__loader = loader

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # `inspect` looks for the file of each module
            raise AttributeError(name)
        self.run()
        return getattr(self, name)

    def run(self) -> None:
        loader, self.__class__ = self.__loader, ModuleType  # type: ignore[assignment]
        loader.exec_module(self)


class _Torch:
    """Imports torch without searching for garbage, and without its kernels for tensors without data.

    The kernels, a fifth of the import, come with torch.compile. A torch.Generator, as in a DataLoader's worker, needs
    them at once: such a job has DISTDIAG_TESTS_WHOLE_TORCH in its environment. Programs forked from a server and the
    tests themselves have them.
    """

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._searched = True

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name == "torch":
            self._searched = gc.isenabled()
            gc.disable()
        elif name == "torch._dynamo":
            sys.meta_path.remove(self)
            kernels = sys.modules.get(_KERNELS)
            if isinstance(kernels, _Later):
                kernels.run()
        elif name == _KERNELS and self._loader is None:  # the last of torch's imports
            if self._searched:
                gc.freeze()
                gc.enable()
            spec = PathFinder.find_spec(name, path)
            if spec is not None and "DISTDIAG_TESTS_WHOLE_TORCH" not in os.environ:
                self._loader, spec.loader = spec.loader, self  # type: ignore[assignment]
            return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert self._loader is not None
        return _Later(spec.name, self._loader)

    def exec_module(self, module: ModuleType) -> None:
        """See _Later."""


_compile = builtins.compile


def _compile_sent(source: Any, name: Any, *how: Any, **more: Any) -> Any:  # noqa: ANN401 - of compile
    """Compile, or take what was compiled of the same source in our folder, if an agent compiles what it was sent."""
    if type(name) is str and name.startswith("<distdiag>/"):
        for folder in sys.path:
            path = f"{folder}/distdiag/{name[11:]}"
            if os.path.isfile(path):
                with open(path, encoding="utf-8") as file:
                    code = SourceFileLoader(name, path).get_code(name) if file.read() == source else None
                if code is not None:
                    _imp._fix_co_filename(code, name)  # type: ignore[attr-defined]
                    return code
    return _compile(source, name, *how, **more)


builtins.compile = _compile_sent  # type: ignore[assignment]
sys.meta_path.insert(0, _Torch())
# What a job has imported is not searched for garbage when it ends: a fifth of the time of an import of torch.
atexit.register(gc.freeze)
