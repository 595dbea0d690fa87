"""Hugging Face ↔ Megatron checkpoints: one set of rules, played both ways."""

from ckpt_convert.errors import ConvertError

__all__ = ["ConvertError"]
