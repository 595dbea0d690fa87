"""A value head: one number from each hidden state. On the policy's own backbone, or on that of a separate critic."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

NAME = "value_head"


class ValueHead(torch.nn.Module):
    """``v = w . h + b``, in fp32 at least; both start at 0, so that an untrained head says 0 of every state.

    Every tensor-parallel rank holds it whole and computes all tokens of its context-parallel share. With ``detach`` its
    gradient stops here and leaves the backbone alone.
    """

    def __init__(self, config: TransformerConfig, detach: bool):
        super().__init__()
        self.detach = detach
        self.sequence_parallel = config.sequence_parallel  # whether the backbone's hidden states are split by token
        where = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=where))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=where))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[T, h]``, the same on all tensor-parallel ranks -> ``[T]``."""
        if self.detach:
            hidden = hidden.detach()
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return torch.nn.functional.linear(hidden.to(wide), self.weight.to(wide), self.bias.to(wide)).squeeze(-1)


class Critic(GPTModel):
    """A backbone whose last stage has a value head and no vocabulary: the output layer is given up as soon as it is made."""

    def __init__(self, config: TransformerConfig, *arguments: Any, detach: bool = False, **facts: Any):
        super().__init__(config, *arguments, **facts | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = None
            self.value_head = ValueHead(config, detach)

    def sharded_state_dict(self, *arguments: Any, **how: Any) -> dict[str, Any]:
        last: bool = self.post_process
        self.post_process: bool = False  # or an output layer is looked for
        try:
            return super().sharded_state_dict(*arguments, **how)
        finally:
            self.post_process = last
