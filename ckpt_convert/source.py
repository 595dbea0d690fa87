"""Where tensors come from: a Hugging Face folder, a seed, or a dictionary. Read lazily, one tensor at a time."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ckpt_convert.errors import ConvertError
from ckpt_convert.families.base import Family
from ckpt_convert.hfconfig import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class TensorSource(Protocol):
    """Hugging Face tensors by name. ``get`` may return a view of mapped memory: copy before writing to it."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def get(self, name: str) -> Tensor: ...


class DictSource:
    """Tensors held in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


class RandomSource:
    """A random start: each tensor from its own generator, seeded by (seed, name), the same under every layout.

    As Hugging Face initializes: vectors (norms) are 1, matrices normal with the config's ``initializer_range``.
    """

    def __init__(self, family: Family, seed: int):
        self._shapes, self._std, self._seed = family.shapes(), family.arch.init_std, seed

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        return torch.empty(shape).normal_(0.0, self._std, generator=generator)


class SafetensorsSource:
    """A Hugging Face folder with ``model.safetensors``, or shards and their index; mapped, so only what is used is read.

    Raises ConvertError, naming file and tensor, for a missing, truncated or damaged file and for an index that does not
    match its files.
    """

    def __init__(self, folder: Path | str):
        folder = Path(folder)
        single, index = folder / SINGLE, folder / INDEX
        if single.exists() and index.exists():
            raise ConvertError(f"{folder} holds both {SINGLE} and {INDEX}; remove the one that is stale")
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ConvertError(f"{index} has no weight_map; fetch or write it again")
            files = {name: folder / str(file) for name, file in weight_map.items()}
        elif single.exists():
            files = dict.fromkeys(_open(single).keys(), single)
        else:
            raise ConvertError(f"{folder} holds neither {SINGLE} nor {INDEX}; give a Hugging Face folder with safetensors")
        self._handles = {file: _open(file) for file in sorted(set(files.values()))}
        self._files = files
        for file, handle in self._handles.items():
            listed = {name for name, where in files.items() if where == file}
            stored = set(handle.keys())
            for name in sorted(listed - stored):
                raise ConvertError(f"{file} lacks tensor {name}, which {INDEX} says it holds; fetch or write it again")
            for name in sorted(stored - listed):
                raise ConvertError(f"{file} holds tensor {name}, which {INDEX} does not list; fetch or write it again")

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            raise ConvertError(f"{self._files[name]}: tensor {name} has dtype {stored}; convertible are {', '.join(DTYPES)}")
        return DTYPES[stored]

    def get(self, name: str) -> Tensor:
        return self._handle(name).get_tensor(name)

    def where(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name]

    def _handle(self, name: str) -> Any:
        if name not in self._files:
            raise ConvertError(f"no tensor {name} in the checkpoint")
        return self._handles[self._files[name]]

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ConvertError(f"{file} is missing, but {INDEX} lists it; fetch it again") from None
    except SafetensorError as e:
        raise ConvertError(f"{file} is truncated or damaged ({e}); fetch or write it again") from None


def check_source(family: Family, source: TensorSource) -> None:
    """Raises ConvertError unless the source holds exactly the family's tensors, in the family's shapes.

    A tied model may store its head besides, if it is bit-equal to the embedding.
    """
    shapes, present = family.shapes(), set(source.names())
    for name in shapes:
        if name not in present:
            raise ConvertError(f"{_origin(source)}: tensor {name} is missing, but the config implies it; fetch it whole")
    for name in sorted(present - set(shapes)):
        if name not in family.duplicates():
            raise ConvertError(
                f"{_origin(source, name)}: tensor {name} has no rule in family {family.model_type}; "
                "config and weights do not belong together, or the family needs a rule"
            )
    for name, shape in shapes.items():
        if (found := source.shape(name)) != shape:
            raise ConvertError(f"{_origin(source, name)}: tensor {name} has shape {found}, but the config implies {shape}")
    for name, original in family.duplicates().items():
        if name in present and not torch.equal(source.get(name), source.get(original)):
            raise ConvertError(
                f"{_origin(source, name)}: tie_word_embeddings is true, but {name} differs from {original}; "
                "set it to false in config.json, or fix the weights"
            )


def _origin(source: TensorSource, name: str | None = None) -> str:
    if not isinstance(source, SafetensorsSource):
        return type(source).__name__
    return str(source.where(name) if name else sorted(source._handles)[0].parent)


def common_dtype(source: TensorSource) -> torch.dtype:
    """The dtype of all tensors. Raises ConvertError when they are mixed or neither float32 nor bfloat16."""
    found: dict[torch.dtype, str] = {}
    for name in source.names():
        found.setdefault(source.dtype(name), name)
    if len(found) != 1:
        kinds = ", ".join(f"{dtype} ({name})" for dtype, name in found.items())
        raise ConvertError(f"{_origin(source)}: tensors have several dtypes: {kinds}; save the checkpoint in one dtype")
    dtype = next(iter(found))
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConvertError(f"{_origin(source)}: tensors are {dtype}, the learner holds float32 or bfloat16; save it in one")
    return dtype
