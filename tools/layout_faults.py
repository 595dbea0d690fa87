"""Known faults of parallel training as replacements of text, and the tests that must see each; for ``mutate_layouts``."""

from dataclasses import dataclass
from pathlib import Path

LEARNER, MODEL, STEP = (f"mcore_agent/learner/{name}.py" for name in ("learner", "model", "step"))
LOSSES, ROUTING, CONTEXT = (f"mcore_agent/learner/{name}.py" for name in ("moe_losses", "routing", "context"))
LOGPROB, ATTENTION = (f"mcore_agent/learner/{name}.py" for name in ("logprob", "attention"))
FINALIZE = "            finalize_model_grads(self.model.chunks, None)\n"
PASS = "        done = run(self.model, micro, Ask(terms, self.temperature), gradients=True)\n"


class MutationError(RuntimeError):
    """A run that proves nothing; the message says why."""


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    file: str
    old: str  # in the file exactly once
    new: str
    tests: tuple[str, ...]  # pytest node ids

    def apply(self, root: Path) -> str:
        """Writes the fault into the tree at ``root`` and returns the file's text from before. Raises MutationError."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise MutationError(f"{self.name}: {self.file} holds the text {self.old.strip()!r} {count} times, not once; adapt the fault")
        path.write_text(text.replace(self.old, self.new))
        return text


def layout(name: str) -> tuple[str, ...]:
    return (f"tests/learner/test_layouts.py::test_equals_one_process[{name}]",)


def router(name: str) -> tuple[str, ...]:
    return (f"tests/learner/test_composition.py::test_router_losses_equal_their_definition[{name}]",)


FAULTS = [
    # ------------------------------------------------------------------ sums over micro-batches and ranks
    Fault(
        "micro_batches_averaged",
        "gradients are divided by the number of micro-batches",
        LEARNER,
        PASS,
        PASS + "        for parameter in self.model.parameters().values():\n            parameter.main_grad /= len(micro)\n",
        layout("alone-dense-off"),
    ),
    Fault(
        "megatron_averages",
        "Megatron's schedule divides the loss by tokens and micro-batches, and its buffers by ranks",
        MODEL,
        "        calculate_per_token_loss=True,\n",
        "        calculate_per_token_loss=False,\n",
        layout("alone-dense-off"),
    ),
    Fault(
        "ranks_averaged",
        "gradients are the mean over data-parallel ranks instead of the sum",
        LEARNER,
        FINALIZE,
        "            for chunk in self.model.chunks:\n"
        "                for part in chunk.bucket_groups:\n"
        "                    for bucket in part.buckets:\n"
        "                        bucket.gradient_scaling_factor = 1 / self.groups.layout.dp\n" + FINALIZE,
        layout("dp2-dense-off"),
    ),
    Fault(
        "finalize_skipped",
        "gradients are not reduced over ranks",
        LEARNER,
        FINALIZE,
        "            pass\n",
        layout("dp2-dense-off"),
    ),
    Fault(
        "gradients_kept",
        "gradient buffers are not emptied before a pass",
        LEARNER,
        "            chunk.zero_grad_buffer()\n",
        "            pass\n",
        ("tests/learner/test_steps.py::test_splits_do_not_matter[qwen3]",),
    ),
    Fault(
        "loss_of_one_rank",
        "the reported loss is not summed over data-parallel ranks",
        STEP,
        "            dist.all_reduce(sums, group=groups.dp)\n",
        "            pass\n",
        layout("dp2-dense-off"),
    ),
    # ------------------------------------------------------------------ context parallelism
    Fault(
        "cp_not_reduced",
        "gradients are summed over data-parallel ranks but not over context-parallel ones",
        LEARNER,
        FINALIZE,
        "            for chunk in self.model.chunks:\n"
        "                for part in chunk.bucket_groups:\n"
        "                    part.intra_distributed_optimizer_instance_group = self.groups.dp\n"
        "                    part.intra_distributed_optimizer_instance_size = self.groups.layout.dp\n"
        "                    part.intra_distributed_optimizer_instance_rank = self.groups.dp_rank\n" + FINALIZE,
        layout("cp2-dense-off"),
    ),
    Fault(
        "cp_reduced_twice",
        "gradients of log-probabilities are summed over the context-parallel ranks, each of which has the whole loss",
        LOGPROB,
        "values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=head.cp)",
        "values = gather_from_sequence_parallel_region(values, group=head.cp)",
        layout("cp2-dense-off"),
    ),
    Fault(
        "cp_keys_not_reduced",
        "a key's gradient misses what queries of other context-parallel ranks give",
        CONTEXT,
        "        dist.reduce_scatter_single(own, total.index_select(0, ctx.order), group=ctx.group)\n",
        "        own = total.index_select(0, ctx.order).chunk(ctx.group.size())[ctx.group.rank()]\n",
        layout("tp2cp2-dense-off"),
    ),
    Fault(
        "cp_order_kept",
        "log-probabilities stay in the order of the ranks that computed them",
        LOGPROB,
        "        return values if place is None else values.index_select(0, place)\n",
        "        return values\n",
        layout("tp2cp2-dense-off"),
    ),
    # ------------------------------------------------------------------ tensor and sequence parallelism
    Fault(
        "norms_not_reduced",
        "norm weights are not marked sequence-parallel",
        ATTENTION,
        "        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]\n",
        "        self.weight.sequence_parallel = False\n",
        layout("tp2-sp-dense-off"),
    ),
    Fault(
        "qk_norms_not_reduced",
        "gradients of query and key norms stay those of a tensor-parallel rank's own heads",
        LEARNER,
        FINALIZE,
        "            self.model.config.qk_layernorm = False\n" + FINALIZE,
        layout("tp2-dense-off"),
    ),
    Fault(
        "padded_vocabulary_counted",
        "the columns that fill up the vocabulary take part in the softmax",
        STEP,
        "        valid=max(0, min(columns, model.family.arch.vocab - first)),\n",
        "        valid=columns,\n",
        layout("tp2-dense-off"),
    ),
    Fault(
        "value_reduced_twice",
        "under sequence parallelism every tensor-parallel rank's copy of the value gradient is counted",
        LOGPROB,
        "mine = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=False, group=head.tp)",
        "mine = gather_from_sequence_parallel_region(mine, group=head.tp)",
        (
            "tests/learner/test_value.py::test_equals_the_definition"
            "[both-Layout(tp=2, pp=1, vpp=1, cp=2, ep=1, etp=2, dp=1, sp=True)-qwen3]",
        ),
    ),
    # ------------------------------------------------------------------ pipeline parallelism
    Fault(
        "tied_embedding_not_reduced",
        "the first stage's embedding and the last stage's output layer keep their own gradients",
        LEARNER,
        FINALIZE,
        "            for module in self.model.modules:\n                module.share_embeddings_and_output_weights = False\n" + FINALIZE,
        layout("pp2-dense-tied-off"),
    ),
    Fault(
        "messages_batched",
        "interleaved stages on two ranks send batched messages, which are matched with the wrong ones",
        MODEL,
        "        overlap_p2p_comm=layout.vpp > 1,\n        batch_p2p_comm=layout.vpp == 1,\n",
        "        overlap_p2p_comm=False,\n        batch_p2p_comm=True,\n",
        layout("pp2vpp2-dense-off"),
    ),
    # ------------------------------------------------------------------ experts and their router
    Fault(
        "experts_times_ep",
        "gradients of experts are multiplied by the number of ranks that share them out",
        LEARNER,
        FINALIZE,
        FINALIZE
        + "            for name, parameter in self.model.parameters().items():\n"
        + "                parameter.main_grad *= self.groups.layout.ep if '.local_experts.' in name else 1\n",
        layout("ep2dp2-moe-off-alltoall"),
    ),
    Fault(
        "aux_loss_doubled",
        "the load-balancing loss has twice its weight in the gradient",
        LOSSES,
        "(self.losses.aux * aux + ",
        "(2 * self.losses.aux * aux + ",
        router("one"),
    ),
    Fault(
        "aux_loss_of_own_tokens",
        "a rank balances its own tokens where a micro-batch is split over ranks",
        LOSSES,
        "        if self.tp_cp_group.size() > 1:\n",
        "        if False:\n",
        router("cp2"),
    ),
    Fault(
        "aux_loss_of_one_rank",
        "router losses are weighted by the tokens of one data-parallel rank",
        LOSSES,
        "    if groups.layout.dp > 1:\n        dist.all_reduce(count, group=groups.dp)\n",
        "",
        router("dp2"),
    ),
    Fault(
        "aux_loss_counts_padding",
        "router losses count the tokens that fill up a micro-batch",
        LOSSES,
        "constant_values=True",
        "constant_values=False",
        router("cp2"),
    ),
    Fault(
        "recomputed_router_counted",
        "the first forward of a layer that is computed again counts in the router losses too",
        LOSSES,
        "        if not (self.training and torch.is_grad_enabled()):",
        "        if False:",
        ("tests/learner/test_composition.py::test_recomputed_layers_count_once",),
    ),
    Fault(
        "routing_shifted",
        "every layer replays the experts of the layer before it, as if a dense one stood in front",
        ROUTING,
        "    return {layer: ids[:, i].contiguous() for i, layer in enumerate(layers) if layer in own}\n",
        "    return {layer: ids[:, i - 1].contiguous() for i, layer in enumerate(layers) if layer in own}\n",
        ("tests/learner/test_routing.py::test_replay_under_every_layout",),
    ),
    Fault(
        "routing_by_local_layer",
        "a later stage replays the experts of the first one's layers",
        ROUTING,
        "Replay(first + index)",
        "Replay(index)",
        ("tests/learner/test_routing.py::test_replay_under_every_layout",),
    ),
    # ------------------------------------------------------------------ memory and other weights
    Fault(
        "micro_batches_held",
        "all prepared micro-batches stay in memory to the end of a pass",
        STEP,
        "_shared_out(batches(), layout.vpp)",
        "_shared_out(iter(list(batches())), layout.vpp)",
        ("tests/learner/test_ragged.py::test_memory_does_not_grow_with_micro_batches[alone-qwen3_moe-alltoall]",),
    ),
    Fault(
        "snapshot_stays",
        "a pass under a snapshot leaves its weights in place of the current ones",
        LEARNER,
        "                parameter.data, kept[i] = kept[i], parameter.data\n",
        "                parameter.data = kept[i]\n",
        ("tests/learner/test_steps.py::test_reference_policy_stays",),
    ),
]
