"""Chat templates: tokens and masks are those of transformers, and no template gets out of its sandbox."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshd.transform.assets import Asset
from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec
from meshwire.strict_json import PlanError
from tests.golden.chat_peers import DOCUMENTS, TALK, config_file, tokenizer_file

PEERS = json.loads((Path(__file__).parents[2] / "golden/ops/chat_peers.json").read_text())
TOKENIZER = tokenizer_file()


def rendered(document: Any, config: bytes, template: bytes | None = None, **args: Any) -> Any:
    files = {hashlib.sha256(data).hexdigest(): data for data in (TOKENIZER, config, template) if data}
    named = {"file": TOKENIZER, "config": config, "template": template}
    given = {name: f"sha256:{hashlib.sha256(data).hexdigest()}" for name, data in named.items() if data}
    chain = compile_chain(
        [(0, OpSpec("tokenize_chat", "x", given | args))], load=lambda digest: Asset(digest, files[digest])
    )
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return chain.render(data, lambda index: KeyedRandom(1, 0, 0, index))


@pytest.mark.parametrize("name", PEERS)
def test_tokens_are_those_of_transformers(name: str) -> None:
    template, title = name.split("/")
    wanted, config = PEERS[name], config_file(template)
    tokens = rendered(DOCUMENTS[title], config)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == wanted["tokens"]
    assert rendered(DOCUMENTS[title], config, prompt=True).tolist() == wanted["prompt"]
    mask = rendered(DOCUMENTS[title], config, output="answer_mask")
    assert mask.shape == tokens.shape
    if wanted["mask"] is not None:
        assert mask.tolist() == wanted["mask"]


def test_answers_are_found_without_marks() -> None:
    """In ChatML: each answer with its end, but not the newline that its message adds and no one says."""
    config = config_file("chatml")
    tokens, mask = rendered(TALK, config), rendered(TALK, config, output="answer_mask")
    characters = {number: token for token, number in json.loads(TOKENIZER)["model"]["vocab"].items()}
    said = "".join(characters.get(number, "|") for number in tokens[mask == 1].tolist())
    assert said.startswith("ĠĠFine,")
    assert said.count("|") == 2
    assert said.endswith("Sunny|Ċ")
    rewriting = json.dumps(
        {"chat_template": "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"}
    )
    with pytest.raises(BadSampleError, match=r"answer 2 cannot be found.*generation"):
        rendered(TALK, rewriting.encode(), output="answer_mask")


def test_a_template_of_its_own_and_named_ones() -> None:
    plain = b"{% for message in messages %}{{ message.content }}{% endfor %}"
    config = json.dumps(
        {"bos_token": "<s>", "chat_template": [{"name": "default", "template": plain.decode()}]}
    ).encode()
    assert rendered(TALK, b"{}", plain).tolist() == rendered(TALK, config).tolist()
    for wrong, reason in (
        (b"[]", "is an object"),
        (b"{}", "has no chat_template"),
        (b'{"chat_template": "{%"}', "not a chat"),
    ):
        with pytest.raises(PlanError, match=reason):
            rendered(TALK, wrong)


HOSTILE = {
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "formatting": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "changing": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "no end": "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}",
    "a large range": "{{ range(999999999) | list }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a refusal": "{{ raise_exception('no') }}",
    "a wrong type": "{{ 1 + messages }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_that_go_too_far_make_bad_samples(name: str) -> None:
    with pytest.raises(BadSampleError):
        rendered(TALK, json.dumps({"chat_template": HOSTILE[name]}).encode())


@pytest.mark.parametrize("document", [b"", b"{", b"3", b"{}", b'{"messages": 3}', b"\xff", b"[" * 5000])
def test_what_is_no_conversation_is_bad(document: bytes) -> None:
    with pytest.raises(BadSampleError):
        rendered(document, config_file("chatml"))


def test_conversations_under_another_name_are_told_how_to_take_them() -> None:
    document = b'{"id": 1, "conversations": [{"role": "user", "content": "hi"}]}'
    with pytest.raises(
        BadSampleError, match=r"ops\.json\(FIELD, 'conversations', type='json'\) takes this list"
    ):
        rendered(document, config_file("chatml"))
