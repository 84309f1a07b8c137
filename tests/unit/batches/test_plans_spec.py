"""Specs: defaults, refusals with the field's path, the canonical spelling, the hash."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwire.plan.plan_spec import OpSpec, PlanSpec, canonical_spec, parse_spec, plan_hash, spec_document
from meshwire.plan.shuffle import ShuffleSpec
from meshwire.strict_json import MAX_DOCUMENT_BYTES, PlanError

SNAPSHOT = "ab" * 32
FULL: dict[str, Any] = {
    "version": 1,
    "ops": [
        {"op": "decode", "field": "image", "args": {}, "version": "1"},
        {
            "op": "random_resized_crop",
            "field": "image",
            "args": {"size": 224, "scale": [0.08, 1.0]},
            "version": "3",
        },
    ],
    "seed": 7,
    "shuffle": {"kind": "blocks", "shards": 64},
    "tail": "drop",
    "on_bad": "raise",
    "max_bad": 0.25,
}


def test_a_full_spec_is_read_as_written() -> None:
    spec = parse_spec(json.dumps(FULL))
    assert spec.ops[1] == OpSpec("random_resized_crop", "image", {"size": 224, "scale": [0.08, 1.0]}, "3")
    assert spec.shuffle == ShuffleSpec("blocks", 64)
    assert (spec.seed, spec.tail, spec.on_bad, spec.max_bad) == (7, "drop", "raise", 0.25)
    assert spec_document(spec) == FULL


def test_everything_has_a_default() -> None:
    assert parse_spec("{}") == PlanSpec()
    assert parse_spec({}) == parse_spec(b"{}")


def test_the_canonical_spelling_does_not_depend_on_order_or_on_how_a_number_is_written() -> None:
    shuffled = {name: FULL[name] for name in reversed(FULL)}
    whole = json.loads(json.dumps(FULL).replace("224", "224.0").replace("[0.08, 1.0]", "[8e-2, 1]"))
    assert (
        canonical_spec(parse_spec(shuffled))
        == canonical_spec(parse_spec(FULL))
        == canonical_spec(parse_spec(whole))
    )
    assert parse_spec(canonical_spec(parse_spec(FULL))) == parse_spec(FULL)


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        ({"sede": 1}, "sede", "did you mean 'seed'"),
        ({"seed": -1}, "seed", "outside"),
        ({"seed": 2**63}, "seed", "outside"),
        ({"seed": True}, "seed", "integer"),
        ({"seed": "7"}, "seed", "integer"),
        ({"version": 2}, "version", "upgrade"),
        ({"ops": {}}, "ops", "list"),
        ({"ops": [1]}, "ops[0]", "object"),
        ({"ops": [{"op": "decode"}]}, "ops[0].field", "missing"),
        ({"ops": [{"op": "decode", "field": "x", "arg": {}}]}, "ops[0].arg", "did you mean 'args'"),
        ({"ops": [{"op": "decode", "field": "x", "args": []}]}, "ops[0].args", "object"),
        ({"ops": [{"op": "", "field": "x"}]}, "ops[0].op", "name"),
        ({"ops": [{"op": "a", "field": "a b"}]}, "ops[0].field", "name"),
        ({"ops": [{"op": "a", "field": "b", "version": 1}]}, "ops[0].version", "text"),
        ({"ops": [{"op": "a", "field": "b", "args": {"n": [2**63]}}]}, "ops[0].args.n[0]", "outside"),
        ({"ops": [{"op": "a", "field": "b"}] * 257}, "ops", "at most 256"),
        ({"shuffle": "global"}, "shuffle", "object"),
        ({"shuffle": {"kind": "globl"}}, "shuffle.kind", "did you mean 'global'"),
        ({"shuffle": {"kind": "blocks"}}, "shuffle.shards", "missing"),
        ({"shuffle": {"kind": "blocks", "shards": 0}}, "shuffle.shards", "outside"),
        ({"shuffle": {"kind": "none", "shards": 3}}, "shuffle.shards", "only a blocks"),
        ({"tail": "pads"}, "tail", "did you mean 'pad'"),
        ({"on_bad": None}, "on_bad", "substitute"),
        ({"max_bad": 1.5}, "max_bad", "outside"),
        ({"max_bad": "0.1"}, "max_bad", "number"),
        ({"max_bad": float("nan")}, "max_bad", "finite"),
    ],
)
def test_what_is_wrong_is_named(document: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        parse_spec(document)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        '{"max_bad": NaN}',
        '{"max_bad": Infinity}',
        '{"max_bad": 1e999}',
        '{"seed": 1, "seed": 2}',
        '{"ops": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"ops": ' + "[" * 40 + "]" * 40 + "}",
        '{"tail": "\\ud800"}',
        b"\xff\xfe{}",
        b'{"tail": "\xff"}',
        "1" * 5000,
        " " * (MAX_DOCUMENT_BYTES + 1),
        '{"ops": [' + ",".join(["[0,0,0,0,0,0,0,0,0]"] * 50_000) + "]}",
    ],
)
def test_documents_that_are_not_specs_are_refused(text: str | bytes) -> None:
    with pytest.raises(PlanError):
        parse_spec(text)


def test_messages_stay_short_whatever_the_input() -> None:
    with pytest.raises(PlanError) as caught:
        parse_spec({"x" * 60_000: 1})
    assert len(str(caught.value)) < 400


def test_the_hash_covers_snapshot_and_spec_and_needs_versions() -> None:
    spec = parse_spec(FULL)
    assert plan_hash(SNAPSHOT, spec) != plan_hash("cd" * 32, spec)
    assert plan_hash(SNAPSHOT, spec) != plan_hash(SNAPSHOT, parse_spec({**FULL, "seed": 8}))
    with pytest.raises(PlanError, match="has no version") as caught:
        plan_hash(SNAPSHOT, parse_spec({"ops": [{"op": "decode", "field": "image"}]}))
    assert caught.value.path == "ops[0].version"
    with pytest.raises(PlanError, match="64 lower-case hex"):
        plan_hash("AB" * 32, spec)
