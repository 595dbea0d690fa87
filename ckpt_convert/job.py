"""What a group of ranks is asked to do."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Job:
    """``save``: Hugging Face folder -> torch_dist files. ``export``: Megatron checkpoint -> safetensors files."""

    do: str
    source: str  # a folder
    target: str  # an existing folder
    dtype: str  # fp32 or bf16
    duplicates: tuple[str, ...] = ()  # copies that an export stores besides
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.ep

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        fields = json.loads(text)
        return Job(**{**fields, "duplicates": tuple(fields["duplicates"])})
