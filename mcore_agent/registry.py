"""Named variants behind protocols. A variant is one file in its kind's folder; no list names it.

``@register("estimator", "grpo")`` on a class or function; ``create("estimator", {"name": "grpo", "eps": 0})``
makes one. The first look at a kind imports every module of its folder.
"""

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

FOLDERS = {
    "env": "mcore_agent.env",
    "reward": "mcore_agent.reward",
    "filter": "mcore_agent.credit",
    "shaping": "mcore_agent.credit",
    "estimator": "mcore_agent.credit",
    "transform": "mcore_agent.credit",
    "normalizer": "mcore_agent.credit",
    "loss": "mcore_agent.loss",
    "aggregation": "mcore_agent.loss",
    "parser": "mcore_agent.agent",
    "source": "mcore_agent.task",
    "engine": "mcore_agent.rollout",
}

_found: dict[str, dict[str, Any]] = {kind: {} for kind in FOLDERS}
_loaded: set[str] = set()


class RegistryError(ValueError):
    """No such variant, or arguments that it does not take. The message lists what there is."""


def register(kind: str, name: str) -> Callable[[Any], Any]:
    """Decorator: makes ``name`` a variant of ``kind``. Raises RegistryError when the name is taken."""

    def add(variant):
        known = _found[kind].get(name)
        if known is not None and (known.__module__, known.__qualname__) != (variant.__module__, variant.__qualname__):
            raise RegistryError(f"{kind} {name!r} is defined twice: {known.__module__} and {variant.__module__}")
        _found[kind][name] = variant
        variant.registered_name = name
        return variant

    return add


def variants(kind: str) -> dict[str, Any]:
    """All variants of a kind by name, after importing the kind's folder."""
    if kind not in FOLDERS:
        raise RegistryError(f"no kind {kind!r}; kinds: {', '.join(sorted(FOLDERS))}")
    folder = FOLDERS[kind]
    if folder not in _loaded:
        package = importlib.import_module(folder)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{folder}.{module.name}")
        _loaded.add(folder)
    return dict(sorted(_found[kind].items()))


def get(kind: str, name: str) -> Any:
    """The variant. Raises RegistryError with the nearest names when there is none."""
    known = variants(kind)
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]


def unknown(kind: str, name: str, known: Collection[str]) -> RegistryError:
    """The error for a name that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return RegistryError(f"no {kind} {name!r}{hint} Known: {', '.join(sorted(known)) or 'none'}")


def check(kind: str, spec: Mapping[str, Any], supplied: Collection[str] = ()) -> None:
    """Raises RegistryError unless ``spec`` names a variant and gives only arguments that it takes, of the right type.

    ``supplied`` names arguments that come from elsewhere.
    """
    if "name" not in spec:
        raise RegistryError(f"a {kind} needs the key 'name'; known: {', '.join(variants(kind))}")
    variant = get(kind, spec["name"])
    parameters = inspect.signature(variant).parameters
    hints = typing.get_type_hints(variant if dataclasses.is_dataclass(variant) else variant.__init__)
    for key, value in spec.items():
        if key == "name":
            continue
        if key not in parameters:
            near = difflib.get_close_matches(key, parameters, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RegistryError(f"{kind} {spec['name']!r} takes no {key!r}{hint} It takes: {', '.join(parameters) or 'nothing'}")
        if not _fits(value, hints.get(key)):
            raise RegistryError(f"{kind} {spec['name']!r}: {key} is {value!r}, but must be {_name(hints[key])}")
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in spec and key not in supplied:
            raise RegistryError(f"{kind} {spec['name']!r} needs {key!r}")


def create(kind: str, spec: Mapping[str, Any], **extra: Any) -> Any:
    """Makes the variant with the arguments of ``spec`` (checked) and ``extra`` (objects the caller supplies)."""
    check(kind, spec, extra)
    return get(kind, spec["name"])(**{k: v for k, v in spec.items() if k != "name"}, **extra)


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _fits(value: Any, hint: Any) -> bool:
    if hint is None or hint is Any:
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in args
    if args and origin is not None and (origin is typing.Union or str(origin) == "<class 'types.UnionType'>"):
        return any(_fits(value, a) for a in args)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    return isinstance(value, origin or hint) if isinstance(origin or hint, type) else True
