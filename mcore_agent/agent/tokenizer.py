"""A small byte-level tokenizer trained on a task's own text, with a chat template."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_agent.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<answer>", "</answer>")
ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class TokenizerError(ValueError):
    """A tokenizer that cannot be trained as asked: the message says why and what to change."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Byte-pair tokenizer (digits apart, tags as single tokens, ChatML with a tool role), at most ``vocab_size`` tokens.

    ``texts`` are message contents. The same texts give the same tokenizer. The template shows no tool schemas: its
    text has to stay short. Raises TokenizerError when the vocabulary cannot hold all bytes and tags.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [PAD, START, END]
    least = len(alphabet) + len(special) + len(TAGS)
    if vocab_size < least:
        raise TokenizerError(f"vocab_size is {vocab_size}, but bytes, special tokens and tags need {least}; raise it")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS), special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    # Tags are cut out first: as single tokens they need no merges, and must not use any up.
    cut = re.compile("|".join(map(re.escape, (*TAGS, *special))))
    pieces = [piece for text in texts for piece in cut.split(text) if piece]
    if not pieces:
        raise TokenizerError("no text to train a tokenizer on; the environment gives no demonstrations")
    core.train_from_iterator([*pieces, *(f"{role}\n" for role in ROLES for _ in pieces)], trainer)
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def contents(dialogs: Iterable[Sequence[Message]]) -> list[str]:
    """Message contents of dialogs, as ``train_tokenizer`` reads them."""
    return [message["content"] for dialog in dialogs for message in dialog]


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Writes Hugging Face tokenizer files. Raises TokenizerError when they cannot be written."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as e:  # the Rust tokenizers raise nothing more particular
        raise TokenizerError(f"the tokenizer cannot be written to {folder} ({e}); free space or choose another folder") from e


def load_tokenizer(folder: Path):
    """The tokenizer of a Hugging Face folder. Raises TokenizerError when it has none, a damaged one, or no chat template."""
    from transformers import AutoTokenizer

    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise TokenizerError(f"{folder} holds no tokenizer_config.json; copy the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # the Rust tokenizers raise nothing more particular
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise TokenizerError(f"the tokenizer files in {folder} cannot be read ({reason}); copy the model's again") from e
    if not tokenizer.chat_template:
        raise TokenizerError(f"the tokenizer in {folder} has no chat template; add chat_template.jinja of a chat model")
    return tokenizer
