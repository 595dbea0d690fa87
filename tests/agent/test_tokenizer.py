"""The trained tokenizer: small, deterministic, and the same key is the same token everywhere."""

import pytest

from mcore_agent.agent.tokenizer import TAGS, TokenizerError, contents, load_tokenizer, save_tokenizer, train_tokenizer
from mcore_agent.env.hop_lookup import KEYS, HopLookup
from tests.fakes import hop_tokenizer

CALL = '<tool_call>{{"name": "lookup", "arguments": {{"key": "{}"}}}}</tool_call>'
CONTEXTS = ('"{}" 2?', "{}", "<answer>{}</answer>", CALL)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def corpus(n: int = 300) -> list[str]:
    domain = HopLookup()
    return contents(domain.demo(domain.task("train", i), i) for i in range(n))


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_key_is_the_same_single_token_in_every_context(context: str):
    tokenizer = hop_tokenizer()
    numbers = set()
    for key in KEYS:
        [number] = ids(tokenizer, key)
        numbers.add(number)
        assert ids(tokenizer, context.format(key)).count(number) == 1
        rendered = tokenizer.apply_chat_template([{"role": "tool", "content": context.format(key)}], tokenize=False)
        assert ids(tokenizer, rendered).count(number) == 1
    assert len(numbers) == len(KEYS) == 64


def test_a_call_is_short():
    """Every word and every run of punctuation is one token: {" name ": ␣" lookup ", ␣" arguments ": ␣{" key ": ␣" kl "}}"""
    assert len(ids(hop_tokenizer(), CALL.format("kl"))) == 15 + 2  # and the two tags


def test_training_is_deterministic_and_fits():
    again = train_tokenizer(corpus(), 384)
    assert again.get_vocab() == hop_tokenizer().get_vocab()
    assert len(again) <= 384


def test_files_give_the_same_tokenizer(tmp_path):
    save_tokenizer(hop_tokenizer(), tmp_path)
    loaded = load_tokenizer(tmp_path)
    texts = {"user": '"bl" 2?', "assistant": CALL.format("bl"), "tool": "bm"}
    dialog = [{"role": role, "content": text} for role, text in texts.items()]
    kwargs = {"tokenize": False, "add_generation_prompt": True}
    text = loaded.apply_chat_template(dialog, **kwargs)
    assert text == hop_tokenizer().apply_chat_template(dialog, **kwargs)
    assert ids(loaded, text) == ids(hop_tokenizer(), text)
    assert loaded.get_vocab() == hop_tokenizer().get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token) == (hop_tokenizer().pad_token_id, "<|im_end|>")


@pytest.mark.parametrize("text", ["", "é漢字 🙂 \x00\t\r\n", *TAGS, "a 12345 b", CALL.format("zz")])
def test_any_text_comes_back(text: str):
    tokenizer = hop_tokenizer()
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == text  # tags are no special tokens
    assert all(len(ids(tokenizer, tag)) == 1 for tag in TAGS)


def test_digits_are_apart():
    assert len(ids(hop_tokenizer(), "12345")) == 5


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="vocab_size is 200.*need 263"):  # 256 bytes, 3 special tokens, 4 tags
        train_tokenizer(corpus(3), 200)
    with pytest.raises(TokenizerError, match="no text"):
        train_tokenizer([], 384)
    with pytest.raises(TokenizerError, match="no tokenizer_config.json"):
        load_tokenizer(tmp_path)
    bare = train_tokenizer(corpus(3), 300)
    bare.chat_template = None
    save_tokenizer(bare, tmp_path)
    with pytest.raises(TokenizerError, match="no chat template"):
        load_tokenizer(tmp_path)
