"""Fields, ops and orders as a user writes them, and as the protocol has them."""

from __future__ import annotations

from typing import Any

import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.cli.bench import parse_op
from meshsdk.cli.cat import parse_fields
from meshsdk.datasets.fields import check_source, fields_of_names, held_whole, select_fields
from meshsdk.datasets.shuffle import shuffle_spec
from meshsdk.datasets.split_mix import staged
from meshsdk.errors import ConfigurationError
from meshsdk.open_dataset import _OPENERS
from meshwire.plan.plan_spec import OpSpec


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("jpg", {"ext": ["jpg"]}),
        (".JPG", {"ext": ["jpg"]}),
        ("jpg;jpeg; png", {"ext": ["jpg", "jpeg", "png"]}),
        (["jpg", "jpeg"], {"ext": ["jpg", "jpeg"]}),
        ({"ext": ["seg.png"]}, {"ext": ["seg.png"]}),
    ],
)
def test_extensions(given: Any, expected: dict[str, Any]) -> None:
    assert select_fields({"image": given}) == {"image": expected}


@pytest.mark.parametrize("given", ["@class", mesh.class_of_prefix(), {"class": "prefix"}])
def test_classes(given: Any) -> None:
    assert select_fields({"image": "jpg", "label": given})["label"] == {"class": "prefix"}


@pytest.mark.parametrize("fields", [{}, {"image": ""}, {"image": 3}, {"im age": "jpg"}, {"label": "@class"}])
def test_bad_fields_are_explained(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="fields"):
        select_fields(fields)


@pytest.mark.parametrize("given", ["*.jpg", ["jpg", "*.png"]])
def test_an_extension_has_no_wildcards(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"no wildcards; write it as \"jpg\""):
        select_fields({"image": given})


def test_sources() -> None:
    assert check_source("s3://photos/train") == "s3://photos/train/"
    with pytest.raises(ConfigurationError, match="s3://photos/train"):
        check_source("photos/train")
    with pytest.raises(ConfigurationError, match=r"mesh cp -r \./train s3://"):
        check_source("./train")
    with pytest.raises(ConfigurationError, match="as origin: mesh bucket create"):
        check_source("gs://photos/train")


@pytest.mark.parametrize(
    ("names", "prefix", "expected"),
    [
        (
            ["t/cat/1.jpg", "t/dog/2.png"],
            "t/",
            {"image": {"ext": ["jpg", "png"]}, "label": {"class": "prefix"}},
        ),
        (["t/1.jpg", "t/1.cls"], "t/", {"image": {"ext": ["jpg"]}, "label": {"ext": ["cls"]}}),
        (
            ["1.jpg", "1.json", "1.seg.png"],
            None,
            {"image": {"ext": ["jpg"]}, "json": {"ext": ["json"]}, "seg_png": {"ext": ["seg.png"]}},
        ),
        (["t/1.npy", "t/x/2.npy"], "t/", {"npy": {"ext": ["npy"]}}),
        (
            [*(f"t/cat/{number}.jpg" for number in range(10)), "t/classes.txt"],
            "t/",
            {"image": {"ext": ["jpg"]}, "label": {"class": "prefix"}},
        ),
        (
            [*(f"t/{number}.jpg" for number in range(10)), "t/3.json"],
            "t/",
            {"image": {"ext": ["jpg"]}, "json": {"ext": ["json"]}},
        ),
        (["1.jpg", "2.jpg", "3.mp4"], None, {"image": {"ext": ["jpg"]}, "mp4": {"ext": ["mp4"]}}),
    ],
)  # fmt: skip
def test_guesses(names: list[str], prefix: str | None, expected: dict[str, Any]) -> None:
    assert fields_of_names(names, prefix, "s3://t/") == expected


def test_nothing_to_guess_from() -> None:
    with pytest.raises(ConfigurationError, match="fields="):
        fields_of_names(["README", "a/b"], "", "s3://t/")


def test_ops_as_the_plan_has_them() -> None:
    assert ops.decode("image") == OpSpec("decode", "image", {"mode": "rgb"})
    assert ops.decode("mask", mode="unchanged", channels=1).args == {"mode": "unchanged", "channels": 1}
    assert ops.resize("image", 256).args == {"size": 256}
    assert ops.resize("image", 256, filter="fast").args == {"size": 256, "filter": "fast"}
    assert ops.random_resized_crop("image", 9, filter="bilinear").args["filter"] == "bilinear"
    assert "filter" not in ops.random_resized_crop("image", 9, filter="fast").args
    assert ops.rotate("mask", 9, filter="nearest").args == {"degrees": 9.0, "fill": 0, "filter": "nearest"}
    with pytest.warns(DeprecationWarning, match="is now called 'fast'"):
        assert ops.resize("image", 256, filter="antialias").args["filter"] == "fast"  # type: ignore[arg-type]
    assert ops.center_crop("image", [224, 160]).args == {"size": [224, 160]}
    crop = ops.random_resized_crop("image", 224, scale=(0.2, 1))
    assert crop.args == {"size": 224, "scale": [0.2, 1.0], "ratio": [0.75, 1.3333]}
    assert ops.hflip("image", 0.3).args == {"p": 0.3}
    assert ops.as_image("flow").args == {"layout": "hwc"}
    assert ops.as_image("flow", layout="chw", channels=2).args == {"layout": "chw", "channels": 2}
    assert ops.text_label("label", ["cat", "dog"]).args == {"classes": ["cat", "dog"]}
    assert [op("x").op for op in (ops.to_chw, ops.to_hwc, ops.int_label, ops.npy, ops.raw)] == [
        "to_chw", "to_hwc", "int_label", "npy", "raw"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ops.over(("a", "b"), ops.hflip("a")), r"pass the op.*ops\.over\(\('a', 'b'\), ops\.hflip"),  # type: ignore[arg-type]
        (lambda: ops.decode(224), "the first argument is the field"),  # type: ignore[arg-type]
        (lambda: ops.decode("image", mode="bgr"), "mode"),  # type: ignore[arg-type]
        (lambda: ops.decode("image", dtype="uint16"), "dtype and channels are for mode='unchanged'"),
        (lambda: ops.resize("image", 8, filter="lanczos"), "'bilinear', 'bicubic', 'box', 'nearest', 'fast'"),  # type: ignore[arg-type]
        (lambda: ops.rotate("image", 8, filter="box"), "rotate: filter must be"),  # type: ignore[arg-type]
        (lambda: ops.resize("image", 0), "size"),
        (lambda: ops.resize("image", [1, 2, 3]), "size"),
        (lambda: ops.center_crop("image", True), "size"),
        (lambda: ops.random_resized_crop("image", 224, scale=(0.5, 2)), "share of the area"),
        (lambda: ops.random_resized_crop("image", 224, ratio=(2, 1)), "ratio"),
        (lambda: ops.hflip("image", 1.5), "probability"),
        (lambda: ops.text_label("label", ["cat", "cat"]), "different names"),
        (lambda: ops.text_label("label", "cat"), "different names"),
        (lambda: ops.window("x", 64), r"window: extents=64; pass one extent per axis"),  # type: ignore[arg-type]
        (lambda: ops.frombuffer("x", "int8", shape=4), r"frombuffer: shape=4; pass one"),  # type: ignore[arg-type]
        (lambda: staged([1, 1], [(1, 2)], 2), r"mesh\.Stage\(\[1, 1\], epoch=2\)\]; got tuple"),  # type: ignore[list-item]
        (lambda: staged([1], (), 2), "1 weights for 2 datasets: pass one per dataset"),
        (lambda: mesh.Stage([0.5, -1]).document(None), r"weights=\[0\.5, -1\]: a weight must be at least 0"),
    ],
)
def test_bad_ops_say_what_is_wrong(make: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("jsonl", "lines"),
        ("jsonl;ndjson", "lines"),
        ("jsonl.gz", "lines"),
        ("tfrecord-00000-of-00008", "tfrecord"),
        ("00000.mds.zstd", "mds"),
        ("parquet", "table"),
        ("pq", "table"),
        ("csv", "lines"),
        ("tsv.gz", "lines"),
    ],
)
def test_files_of_many_samples_have_a_kind(given: str, kind: str) -> None:
    fields = select_fields({"label": "@class", "index": "json", "x": given})
    assert held_whole(fields).startswith(f"kind={kind!r} makes a sample of every ")


@pytest.mark.parametrize("given", ["jpg", "json", "jpg;jsonl", "parquets"])
def test_files_of_one_sample_have_none(given: str) -> None:
    assert held_whole(select_fields({"label": "@class", "x": given})) == ""
    assert held_whole(select_fields({"boxes": "jsonl", "image": "jpg"})) == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("jsonl", "no kind 'jsonl'; did you mean 'lines'"),
        ("object", "did you mean 'objects'"),
        ("csv", r"kind='lines' makes a sample of every line, .* Parquet: pandas\.read_csv"),
        ("coco", r"mesh\.open_coco"),
        ("9", "known: auto, chunks, lines, "),
        (None, "no kind None; known: auto"),
    ],
)
def test_a_kind_there_is_not_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        mesh.open("s3://photos", kind=given)


def test_openers_of_other_kinds_exist() -> None:
    assert all(hasattr(mesh, f"open_{name}") for name in _OPENERS)


def test_files_of_images_have_no_lines() -> None:
    with (
        mesh.connect("http://127.0.0.1:9", access_key="key", secret_key="secret") as client,
        pytest.raises(ConfigurationError, match=r"\.jpg files have none: kind='objects'"),
    ):
        mesh.open("s3://photos", {"image": "jpg;png"}, kind="lines", client=client)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("json:line:text", "write 'json:line path=text' .`mesh op show json`"),
        ("resize:image:32x32", "write 'resize:image size=32x32'"),
        ("decode:image:rgb", "write 'decode:image NAME=rgb'"),
        ("resize:image:size=32", "write 'resize:image size=32'"),
        ("augment/crop:image:yes", "write 'augment/crop:image NAME=yes'"),
        ("jso:line:text", "no op 'jso'; did you mean 'json'"),
    ],
)
def test_an_argument_without_its_name_is_told_how_to_write_it(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse_op(text)


def test_orders() -> None:
    assert shuffle_spec(True) == shuffle_spec("global") == {"kind": "global"}
    assert shuffle_spec(mesh.Blocks(shards=8)) == {"kind": "blocks", "shards": 8}
    assert shuffle_spec(False) == {"kind": "none"}
    with pytest.raises(ConfigurationError, match="Blocks"):
        shuffle_spec("random")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="window"):
        mesh.Blocks(shards=0)


def test_command_line_spellings() -> None:
    assert parse_op("decode:image") == ops.decode("image")
    assert parse_op("center_crop:image:224") == ops.center_crop("image", 224)
    assert parse_op("resize:image size=[32,48] filter=nearest") == ops.resize(
        "image", [32, 48], filter="nearest"
    )
    assert parse_op("augment/brighten:image gain=1.5") == ops.user("augment/brighten", "image", gain=1.5)
    assert parse_fields(["image=jpg;png", "label=@class"]) == {"image": "jpg;png", "label": "@class"}
    for bad in (
        "decode",
        "center_crop:image",
        "blur:image",
        "decode:image:3",
        "center_crop:image:x",
        "over:image",
        "hflip:image p=2",
    ):
        with pytest.raises(ConfigurationError, match="--op"):
            parse_op(bad)
    with pytest.raises(ConfigurationError, match="--field"):
        parse_fields(["jpg"])
