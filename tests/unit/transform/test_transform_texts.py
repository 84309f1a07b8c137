"""Text, sequences, columns and containers of arrays: what each op gives, and what hostile bytes get."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from meshd.transform.assets import Asset
from meshd.transform.compiler import complete_spec
from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec, parse_spec
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshd.transform.op_chain import OpChain

DIGEST = "a" * 64
Op = tuple[str, Mapping[str, Any]]


def small_tokenizer(**changes: Any) -> bytes:
    """Byte-level BPE over a few words, with <s> and </s> put around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    document = json.loads(tokenizer.to_str())
    return json.dumps(document | changes).encode()


def chain(*ops: Op, data: bytes = b"") -> OpChain:
    specs = [(i, OpSpec(name, "x", args)) for i, (name, args) in enumerate(ops)]
    return compile_chain(specs, load=lambda digest: Asset(digest, data or small_tokenizer()))


def rendered(value: bytes, *ops: Op, data: bytes = b"") -> Any:
    return chain(*ops, data=data).render(value, lambda stream: KeyedRandom(0, 0, 0, stream))


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


TOKENIZE: Op = ("tokenize", {"file": f"sha256:{DIGEST}"})


# --- text ------------------------------------------------------------------------------------------------


def test_utf8_is_checked_and_normalised() -> None:
    assert rendered("\ufeff été \n".encode(), ("utf8", {"strip": True})) == "été".encode()
    assert rendered("e\u0301ﬁ".encode(), ("utf8", {"form": "NFC"})) == "éﬁ".encode()
    assert rendered("e\u0301ﬁ".encode(), ("utf8", {"form": "NFKC"})) == "éfi".encode()
    with pytest.raises(BadSampleError, match="byte 2 is 0xff"):
        rendered(b"ab\xff", ("utf8", {}))


DOCUMENT = json.dumps(
    {"text": "hé", "n": 7, "x": 1.5, "list": [{"a": "deep"}, [1, 2.5]], "none": None, "odd": "\ud800"}
).encode()


@pytest.mark.parametrize(
    ("path", "kind", "value"),
    [
        ("text", "text", "hé".encode()),
        ("list[0].a", "text", b"deep"),
        ("n", "integer", 7),
        ("x", "number", 1.5),
        ("list[1]", "numbers", [1.0, 2.5]),
        ("list[0]", "json", b'{"a":"deep"}'),
        ("none", "json", b"null"),
    ],
)
def test_json_gives_what_is_at_the_path(path: str, kind: str, value: Any) -> None:
    got = rendered(DOCUMENT, ("json", {"path": path, "type": kind}))
    assert got.tolist() == value if isinstance(value, list) else got == value


@pytest.mark.parametrize(
    ("document", "path", "kind", "complaint"),
    [
        (b"{", "a", "text", "not a JSON document"),
        (b"[" * 100_000, "a", "text", "not a JSON document"),
        (b"9" * 10_000, "", "integer", "not a JSON document"),
        (DOCUMENT, "missing", "text", "nothing at missing"),
        (DOCUMENT, "list[7]", "text", "nothing at list\\[7\\]"),
        (DOCUMENT, "text[0]", "text", "nothing at text\\[0\\]"),
        (DOCUMENT, "n", "text", r"n is a number, not a text: \d"),
        (b'{"text": null}', "text", "text", "text is null, not a text: null"),
        (b'{"text": {"en": "a"}}', "text", "text", r'text is an object, not a text: {"en": "a"}'),
        (
            b'{"talk": [1]}',
            "talk",
            "text",
            r"talk is a list, not a text: \[1\]; type='json' takes it, as JSON",
        ),
        (DOCUMENT, "odd", "text", "surrogate"),
        (DOCUMENT, "x", "integer", "not an integer"),
        (b"true", "", "integer", "is a boolean, not an integer of 64 bits: true"),
        (b'"7"', "", "integer", "is a text, not an integer of 64 bits: '7'"),
        (b"1" + b"0" * 30, "", "integer", "not an integer"),
        (b"NaN", "", "number", "not a finite number"),
        (b"1e999", "", "number", "not a finite number"),
        (b"[1, true]", "", "numbers", "not a number"),
        (DOCUMENT, "text", "numbers", "not a list"),
        (b"\xff", "", "json", "not UTF-8"),
    ],
)
def test_json_of_another_form_is_a_bad_sample(document: bytes, path: str, kind: str, complaint: str) -> None:
    with pytest.raises(BadSampleError, match=complaint):
        rendered(document, ("json", {"path": path, "type": kind}))


@pytest.mark.parametrize("path", [".a", "a..b", "a[", "a[x]", "a[1]b", "a]", "a."])
def test_json_paths_are_checked(path: str) -> None:
    with pytest.raises(PlanError, match="expected a path") as caught:
        chain(("json", {"path": path}))
    assert caught.value.path == "ops[0].args.path"


def test_text_goes_through_several_ops() -> None:
    got = rendered(DOCUMENT, ("json", {"path": "text"}), ("utf8", {"form": "NFC"}), TOKENIZE)
    assert Tokenizer.from_buffer(small_tokenizer()).decode(got.tolist()) == "hé"


# --- tokens ----------------------------------------------------------------------------------------------


def test_tokens_are_the_librarys_and_narrow() -> None:
    oracle = Tokenizer.from_buffer(small_tokenizer())
    text = "the cat sat — déjà vu 猫"
    got = rendered(text.encode(), TOKENIZE)
    assert got.dtype == np.uint16
    assert got.tolist() == oracle.encode(text).ids
    plain = rendered(text.encode(), ("tokenize", {**TOKENIZE[1], "special": False, "dtype": "int64"}))
    assert plain.dtype == np.int64
    assert plain.tolist() == got.tolist()[1:-1]
    assert rendered(b"", ("tokenize", {**TOKENIZE[1], "special": False})).shape == (0,)


def test_what_the_file_says_of_truncation_and_padding_does_not_count() -> None:
    data = small_tokenizer(
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<s>",
        },
    )
    assert len(Tokenizer.from_buffer(data).encode("the cat").ids) == 64
    assert rendered(b"the cat", TOKENIZE, data=data).tolist() == rendered(b"the cat", TOKENIZE).tolist()


@pytest.mark.parametrize("data", [b"{}", b"\xff\xfe", b"null", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_a_fault_of_the_plan(data: bytes) -> None:
    with pytest.raises(PlanError, match=r"not a tokenizer\.json") as caught:
        chain(("tokenize", {"file": "sha256:" + "b" * 63 + str(len(data) % 10)}), data=data)
    assert caught.value.path == "ops[0].args.file"


def test_bytes_that_are_no_text_are_a_bad_sample() -> None:
    with pytest.raises(BadSampleError, match="not UTF-8"):
        rendered(b"\xc3", TOKENIZE)
    with pytest.raises(BadSampleError, match="at most 16777216"):
        rendered(b"a" * ((16 << 20) + 1), TOKENIZE)


# --- sequences -------------------------------------------------------------------------------------------

ROW = npy(np.arange(5, dtype=np.int32))
NPY: Op = ("npy", {"dtype": "int32", "shape": [None]})


def test_sequences_are_cut_and_filled() -> None:
    assert rendered(ROW, NPY, ("truncate", {"length": 3})).tolist() == [0, 1, 2]
    assert rendered(ROW, NPY, ("truncate", {"length": 3, "side": "left"})).tolist() == [2, 3, 4]
    assert rendered(ROW, NPY, ("truncate", {"length": 9, "side": "left"})).tolist() == [0, 1, 2, 3, 4]
    assert rendered(ROW, NPY, ("pad_to", {"length": 7, "value": -1})).tolist() == [0, 1, 2, 3, 4, -1, -1]
    assert rendered(ROW, NPY, ("pad_to", {"length": 6, "side": "left"})).tolist() == [0, 0, 1, 2, 3, 4]
    with pytest.raises(BadSampleError, match="truncate"):
        rendered(ROW, NPY, ("pad_to", {"length": 4}))
    both = chain(NPY, ("truncate", {"length": 4}), ("pad_to", {"length": 4}))
    assert both.output.fixed == (4,)


def test_sequences_have_types_of_their_own() -> None:
    table: Op = ("npy", {"dtype": "float32", "shape": [None, 2]})
    assert chain(table, ("pad_to", {"length": 3})).output.fixed == (3, 2)
    got = rendered(npy(np.ones((1, 2), np.float32)), table, ("pad_to", {"length": 2, "value": 0.5}))
    assert got.tolist() == [[1, 1], [0.5, 0.5]]
    wrong: list[tuple[list[Op], str]] = [
        ([("pad_to", {"length": 3})], "needs an array"),
        ([NPY, ("pad_to", {"length": 3, "value": 0.5})], "does not fit into int32"),
        ([NPY, ("pad_to", {"length": 3, "value": 1 << 40})], "does not fit into int32"),
        ([("npy", {"dtype": "int8", "shape": [9]}), ("pad_to", {"length": 3})], "put truncate before"),
    ]
    for ops, complaint in wrong:
        with pytest.raises(PlanError, match=complaint):
            chain(*ops)


# --- columns and labels ----------------------------------------------------------------------------------


def test_columns_are_gathered() -> None:
    data = npy(np.arange(6, dtype=np.int32).reshape(2, 3))
    table: Op = ("npy", {"dtype": "int32", "shape": [None, 3]})
    picked = rendered(data, table, ("gather_columns", {"columns": [2, 0, -1]}))
    assert picked.tolist() == [[2, 0, 2], [5, 3, 5]]
    with pytest.raises(PlanError, match="no column 3 in 3 columns"):
        chain(table, ("gather_columns", {"columns": [3]}))
    loose: Op = ("npy", {"dtype": "int32", "shape": [None, None]})
    with pytest.raises(BadSampleError, match="no column 3 in 3 columns"):
        rendered(data, loose, ("gather_columns", {"columns": [3]}))


def test_labels_are_mapped_and_spread() -> None:
    cats: Op = ("label_map", {"map": {"cat": 1, "tabby": 1, "dog": 0}})
    assert rendered(b"tabby\n", cats) == 1
    assert rendered(b"7", ("int_label", {}), ("label_map", {"map": {"7": 3}})) == 3
    assert rendered(b"fish", ("label_map", {"map": {"cat": 1}, "other": -100})) == -100
    with pytest.raises(BadSampleError, match="'fish' is not in the map"):
        rendered(b"fish", cats)
    assert rendered(b"cat", cats, ("one_hot", {"classes": 3})).tolist() == [0.0, 1.0, 0.0]
    many = rendered(ROW, NPY, ("one_hot", {"classes": 5, "dtype": "uint8"}))
    assert many.tolist() == np.eye(5).tolist()
    with pytest.raises(BadSampleError, match="outside 0…3"):
        rendered(ROW, NPY, ("one_hot", {"classes": 4}))
    assert rendered(b"7", ("int_label", {}), ("cast", {"dtype": "int8"})).dtype == np.int8


def test_arrays_are_normalised_by_column() -> None:
    data = npy(np.array([[1.0, 10.0], [3.0, 30.0]], np.float32))
    got = rendered(
        data,
        ("npy", {"dtype": "float32", "shape": [None, 2]}),
        ("normalize", {"mean": [1, 10], "std": [2, 20], "scale": 1}),
    )
    np.testing.assert_allclose(got, [[0, 0], [1, 1]])


# --- containers ------------------------------------------------------------------------------------------


def test_npz_gives_the_array_of_a_name() -> None:
    data = npz(a=np.arange(6).reshape(2, 3), b=np.ones(2, np.float32))
    args = complete_spec(
        parse_spec({"ops": [{"op": "npz", "field": "x", "args": {"name": "a"}}]}), lambda _: data
    )
    assert args.ops[0].args == {"name": "a", "dtype": "int64", "shape": [None, None]}
    assert rendered(data, ("npz", args.ops[0].args)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rendered(data, ("npz", {"name": "b", "dtype": "float32", "shape": [2]})).tolist() == [1, 1]
    for name, dtype, shape, complaint in [
        ("c", "int64", None, "no array 'c'; it has 'a.npy, b.npy'"),
        ("a", "int32", None, "dtype int64"),
        ("a", "int64", [3, 2], "shape"),
    ]:
        with pytest.raises(BadSampleError, match=complaint):
            rendered(data, ("npz", {"name": name, "dtype": dtype, "shape": shape}))


def test_npz_that_lies_is_a_bad_sample() -> None:
    data = npz(a=np.zeros(100_000))
    op: Op = ("npz", {"name": "a", "dtype": "float64"})
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(BadSampleError):
            rendered(data[:cut], op)
    at = data.rindex(b"PK\x01\x02") + 24  # the size in the central directory
    for claim in (50, 1 << 31):
        with pytest.raises(BadSampleError):
            rendered(data[:at] + struct.pack("<I", claim) + data[at + 4 :], op)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00")
    with pytest.raises(BadSampleError, match="npy"):
        rendered(out.getvalue(), op)


def test_safetensors_gives_the_tensor_of_a_name() -> None:
    data = save({"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.ones(2, np.float32)})
    spec = parse_spec({"ops": [{"op": "safetensors", "field": "x", "args": {"name": "a"}}]})
    args = complete_spec(spec, lambda _: data).ops[0].args
    assert args == {"name": "a", "dtype": "int16", "shape": [None, None]}
    assert rendered(data, ("safetensors", args)).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(BadSampleError, match="no tensor 'c'; it has 'a, b'"):
        rendered(data, ("safetensors", {"name": "c", "dtype": "int16"}))
    for cut in (0, 7, 30, len(data) - 1):
        with pytest.raises(BadSampleError, match="safetensors"):
            rendered(data[:cut], ("safetensors", args))


def test_bfloat16_comes_as_float32() -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<HH", 0x3FC0, 0xC000)
    assert rendered(data, ("safetensors", {"name": "a", "dtype": "float32"})).tolist() == [1.5, -2.0]
