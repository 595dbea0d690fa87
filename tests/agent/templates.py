"""Chat templates that differ in how a turn ends and in what follows it, each with the special tokens it needs."""

from copy import deepcopy

from tokenizers import AddedToken

from tests.fakes import hop_tokenizer

CHATML = hop_tokenizer().chat_template

# A default system message in front, no tool role of its own (SmolLM2).
SYSTEM_FIRST = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Tool results are user messages, several in a row share one; earlier thinking goes once the user speaks again (Qwen3).
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}{%- set why = '' %}
{%- if '</think>' in m.content %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set why = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or why) %}
{{- '<|im_start|>assistant\\n<think>\\n' + why + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# No newline after the end; content trimmed; user and assistant must alternate for the user role (Llama 3 and others).
HEADERS = (
    "{{ '<|begin|>' }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' and loop.previtem['role'] == 'assistant' %}{{ raise_exception('must alternate') }}{% endif %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)

# The next role's header ends a turn: there is no end token of its own (GLM).
ROLE_TOKENS = (
    "{% set heads = {'user': '<|user|>', 'tool': '<|observation|>', 'assistant': '<|assistant|>'} %}"
    "{% for m in messages %}{{ heads[m['role']] + '\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": (CHATML, ()),
    "system_first": (SYSTEM_FIRST, ()),
    "qwen3": (QWEN3, ()),
    "headers": (HEADERS, ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>")),
    "role_tokens": (ROLE_TOKENS, ("<|user|>", "<|observation|>", "<|assistant|>")),
}


def tokenizer_with(template: str, tokens: tuple[str, ...] = ()):
    """A copy of the trained tokenizer with another template and further special tokens."""
    tokenizer = deepcopy(hop_tokenizer())
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in tokens], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def templated(name: str):
    return tokenizer_with(*TEMPLATES[name])
