"""Lets SGLang 0.5.23 start where there is no GPU. Python imports this before anything else, in every process of the server.

* ``sgl_kernel`` 0.4.10 (imported at many places, and on a CPU not called for the models served here) links against libcuda and
  cannot be loaded without a driver. A stand-in gives a name for everything asked of it and refuses to be called.
* ``torch.cuda.synchronize`` and ``empty_cache`` are called whatever the device is; here they do nothing.
* CPUs with AMX get packed weights through ``sgl_kernel``; no CPU has AMX here.
"""

import importlib.abc
import importlib.machinery
import sys
import types

RELEASE = "0.5.23"
ABSENT = "sgl_kernel"


class StandIn(types.ModuleType):
    """A module, and anything in it."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []
        self.__file__ = "<absent>"
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        found = type(name, (), {"__module__": self.__name__}) if name[:1].isupper() else sys.modules.setdefault(full, StandIn(full))
        setattr(self, name, found)
        return found

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} was called, but this machine has no GPU")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-in before the real package."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def adapt_torch() -> None:
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *args, **kwargs: None
        torch.cuda.empty_cache = lambda *args, **kwargs: None
        torch._C._cpu._is_amx_tile_supported = lambda: False


sys.meta_path.insert(0, Finder())
adapt_torch()
