"""What a Megatron checkpoint folder holds besides its tensors, and how a reader knows that it is whole.

    tensors/    weights, and a run's optimizer state, in Megatron's torch_dist format; they can be read under any layout
    critic/     the same of a run's separate critic, if it has one
    hf/         config.json, tokenizer files, chat template: what makes it a model by itself
    meta.json   a Meta, with the size of every file above
    COMPLETE    written last
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckpt_convert.errors import ConvertError
from ckpt_convert.hfconfig import read_json

FORMAT = 1
TENSORS, CRITIC, HF, META, COMPLETE = "tensors", "critic", "hf", "meta.json", "COMPLETE"


@dataclass(frozen=True)
class Meta:
    """Facts of a Megatron checkpoint that neither its tensors nor its config tell."""

    model_type: str
    dtype: str  # fp32 or bf16: of every tensor
    layout: dict[str, int]  # tp, pp, ep, dp of the ranks that wrote it
    duplicates: tuple[str, ...] = ()  # tensors that the Hugging Face folder stored twice, by the name of the copy
    format: int = FORMAT
    files: dict[str, int] = field(default_factory=dict)  # path below the folder -> bytes


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(p for part in (TENSORS, CRITIC, HF) for p in (folder / part).rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.stat().st_size for p in files}


def is_mcore(folder: Path) -> bool:
    """Whether a folder is meant to be a Megatron checkpoint, whole or not."""
    return (folder / META).is_file() or (folder / TENSORS).is_dir() or (folder / HF).is_dir()


def write_meta(folder: Path, meta: Meta) -> None:
    """Writes ``meta.json`` for the files that are in ``folder`` now. Writing COMPLETE is left to the caller."""
    content = asdict(meta) | {"files": _sizes(folder)}
    (folder / META).write_text(json.dumps(content, indent=1) + "\n")


def read_meta(folder: Path) -> Meta:
    """The Meta of a whole checkpoint. Raises ConvertError when the folder is none, is unfinished or lost a part."""
    if not folder.is_dir():
        raise ConvertError(f"{folder} is not a folder; give a Megatron checkpoint made by hf2mcore")
    if not (folder / META).is_file():
        raise ConvertError(f"{folder} holds no {META}; give a Megatron checkpoint made by hf2mcore")
    if not (folder / COMPLETE).is_file():
        raise ConvertError(f"{folder} was not written to its end ({COMPLETE} is missing); convert again")
    content = read_json(folder / META)
    if content.get("format") != FORMAT:
        raise ConvertError(f"{folder / META}: format is {content.get('format')!r}, this release reads {FORMAT}; convert again")
    try:
        meta = Meta(**{**content, "duplicates": tuple(content["duplicates"])})
    except (KeyError, TypeError) as e:
        raise ConvertError(f"{folder / META} lacks or has too much ({e}); copy or convert again") from e
    found = _sizes(folder)
    for name, size in meta.files.items():
        if found.get(name) != size:
            raise ConvertError(f"{folder / name} has {found.get(name, 'no')} bytes, {META} says {size}; copy or convert again")
    return meta
