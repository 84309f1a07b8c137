"""Conversations as Hugging Face's `apply_chat_template` tokenizes them: tests/golden/ops/chat_peers.json.

    pip install --no-deps --target PEERS transformers==5.* huggingface-hub regex typer-slim shellingham
    PYTHONPATH=PEERS python -m tests.golden.chat_peers > tests/golden/ops/chat_peers.json

transformers is not in the development environment. The templates have the forms that models have.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<tool>", "</tool>"]
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
        "+ '<|im_end|>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n    {% if message['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\n' + message['content'] + eos_token }}\n    {% else %}\n"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}\n    {% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}\n"
    ),
    "dated": (
        "{{- bos_token }}{%- if strftime_now is defined %}{%- set date = 'now' %}{%- else %}"
        "{%- set date = '26 Jul 2024' %}{%- endif %}{{- 'Today: ' + date + '\\n' }}"
        "{%- for message in messages %}{%- if message.role == 'system' %}{%- continue %}{%- endif %}"
        "{{- '<' + message.role + '>' + message.content | trim + '<|eot|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
    ),
    "marked": (
        "{%- for message in messages %}{%- if message.role == 'assistant' %}"
        "{{- '<|im_start|>assistant\\n' }}{%- generation %}{{- message.content + '<|im_end|>' }}"
        "{%- endgeneration %}{{- '\\n' }}{%- else %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endif %}{%- endfor %}"
    ),
    "tools": (
        "{%- if tools %}{{- '<tool>' + tools | tojson + '</tool>' }}{%- endif %}"
        "{%- for message in messages %}{%- if message.role not in ['user', 'assistant', 'system'] %}"
        "{{- raise_exception('unknown role ' + message.role) }}{%- endif %}"
        "{{- '<|im_start|>' + message.role + ' ' + message.content }}"
        "{%- if message.tool_calls %}{{- message.tool_calls | tojson(indent=2) }}{%- endif %}"
        "{{- '<|im_end|>' }}{%- endfor %}"
    ),
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "Zürich <&>"}}}]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Grüezi! 你好 — how are you?\n"},
    {"role": "assistant", "content": "  Fine, naïve café 😀. "},
    {"role": "user", "content": "<b>And</b> tomorrow's weather?"},
    {"role": "assistant", "content": "Sunny", "tool_calls": [{"name": "weather", "arguments": {"d": 1.5}}]},
]
DOCUMENTS: dict[str, dict[str, Any]] = {
    "talk": {"messages": TALK},
    "short": {"messages": TALK[1:2]},
    "tools": {"messages": TALK, "tools": TOOLS},
}


def tokenizer_file() -> bytes:
    """A tokenizer of bytes with special tokens, as tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made: Any = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(SPECIAL)
    return str(made.to_str()).encode()


def config_file(template: str) -> bytes:
    """A tokenizer_config.json; one of the special tokens is written as an object, as some have it."""
    tokens = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "pad_token": None}
    return json.dumps({"chat_template": TEMPLATES[template], **tokens}).encode()


def results() -> dict[str, Any]:
    """Return the ids, the ids with a prompt, and the mask of answers if the template marks them."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_file().decode()), bos_token="<s>", eos_token="</s>"
    )
    found = {}
    for name, template in TEMPLATES.items():
        # A template that may ask for the date finds no clock here, as on a node.
        template = template.replace("strftime_now is defined", "false")
        for title, document in DOCUMENTS.items():
            given = {"tools": document.get("tools"), "chat_template": template, "tokenize": True}
            whole = tokenizer.apply_chat_template(
                document["messages"], return_dict=True, return_assistant_tokens_mask=True, **given
            )
            prompt = tokenizer.apply_chat_template(
                document["messages"], add_generation_prompt=True, return_dict=True, **given
            )
            found[f"{name}/{title}"] = {
                "tokens": list(whole["input_ids"]),
                "prompt": list(prompt["input_ids"]),
                "mask": list(whole["assistant_masks"]) if "{%- generation" in template else None,
            }
    return found


if __name__ == "__main__":
    print(json.dumps(results()))
