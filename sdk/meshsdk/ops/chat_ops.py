"""Constructor of the op on conversations: chat templates of language models.

Law: that of `meshsdk.ops`, through which users call it.
"""

from __future__ import annotations

from typing import Any, Literal

from meshsdk.errors import ConfigurationError
from meshsdk.ops import arguments as _values
from meshwire.plan.plan_spec import OpSpec


def tokenize_chat(
    field: str,
    file: str,
    *,
    config: str | None = None,
    template: str | None = None,
    output: Literal["tokens", "answer_mask"] = "tokens",
    prompt: bool = False,
    dtype: Literal["auto", "uint16", "uint32", "int32", "int64"] = "auto",
) -> OpSpec:
    """Tokenize conversations with a model's chat template: bytes of JSON → tokens [n].

    The JSON is a list of messages, or an object with `messages`, and perhaps `tools`. The nodes need
    `shardmesh[chat]`.

    Arguments:
        file: the tokenizer.json, as in `tokenize`.
        config: the tokenizer_config.json, with the special tokens and, in most models, the template.
        template: the chat_template.jinja, if it is a file of its own.
        output: "tokens", or "answer_mask" for uint8 [n], 1 for the tokens that the assistant says.
        prompt: whether to append the prompt for an answer.
        dtype: as in `tokenize`.
    """
    if config is None and template is None:
        raise ConfigurationError("tokenize_chat: pass config, template, or both: where the template is")
    args: dict[str, Any] = {"file": _values.asset("tokenize_chat", file), "output": output, "dtype": dtype}
    for name, given in (("config", config), ("template", template)):
        if given is not None:
            args[name] = _values.asset("tokenize_chat", given)
    return OpSpec("tokenize_chat", _values.field("tokenize_chat", field), args | {"prompt": prompt})
