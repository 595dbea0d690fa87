"""Model families: one small file each, found by folder. ``family_of`` picks one from a Hugging Face config."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

from ckpt_convert.errors import ConvertError
from ckpt_convert.families.base import Family, Param

__all__ = ["Family", "Param", "family_of", "model_types"]


@cache
def _modules() -> dict[str, ModuleType]:
    names = [m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"]
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def model_types() -> tuple[str, ...]:
    """The ``model_type`` values that have a family: the file names of this folder."""
    return tuple(sorted(_modules()))


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config (the content of ``config.json``).

    Raises ConvertError when the model type has no file here, or the config switches on what has no rule.
    """
    kind = hf_config.get("model_type")
    if kind not in _modules():
        raise ConvertError(
            f"config.json: model_type is {kind!r}, which has no family; known: {', '.join(model_types())}. "
            f"Add ckpt_convert/families/{kind}.py"
        )
    return _modules()[kind].family(hf_config)
