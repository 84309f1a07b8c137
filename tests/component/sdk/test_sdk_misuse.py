"""Arguments as a hurried user gives them: each is refused at once, in a sentence that says what to write."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch.distributed

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import (
    AccessError,
    BadSampleError,
    ConfigurationError,
    InvalidPlanError,
    MeshError,
    NotFoundError,
    ServerError,
    server_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.open_dataset import Kind
    from tests.support.daemons import Daemon

BUCKET = "misused"


@pytest.fixture(scope="module", name="client")
def opened(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket(BUCKET)
        for number in range(10):
            client.put(BUCKET, f"{number}.bin", np.full(4, number, np.uint8).tobytes())
        yield client


@pytest.fixture(scope="module", name="ds")
def pinned(client: mesh.Client) -> mesh.Dataset:
    found = mesh.open(f"s3://{BUCKET}/", fields={"x": "bin"}, client=client)
    return found.map(ops.frombuffer("x", "uint8", shape=[4]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"global_batch": 0}, "rows of a step"),
        ({"global_batch": 8.0}, "an integer"),
        ({"global_batch": True}, "an integer"),
        ({"world": 0, "rank": 0}, "at least 1"),
        ({"world": "2", "rank": "0"}, "integers"),
        ({"global_batch": 2, "rank": 0, "world": 3}, "less than 3 ranks"),
        ({"global_batch": 11, "tail": "drop"}, "lower global_batch"),
        ({"connections": "4"}, "1 to 64"),
        ({"prefetch_bytes": 1e8}, "256 << 20"),
        ({"deadline": "1m"}, "seconds, such as 600"),
        ({"deadline": -1}, "seconds, such as 600"),
        ({"share": 5}, "a name"),
        ({"device": 0}, "cuda:N"),
        ({"device": "cud"}, "cuda:N"),
        ({"normalize": True}, "mesh.Normalize"),
        ({"seed": None}, "seed: expected an integer"),
        ({"shuffle": 10}, "mesh.Blocks"),
        ({"tail": "keep"}, "known: drop, pad, ragged"),
        ({"on_bad": "skip"}, "known: drop"),
        ({"buckets": "x"}, "LengthBuckets"),
    ],
)
def test_an_argument_that_makes_no_sense(ds: mesh.Dataset, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        mesh.Loader(ds, **{"global_batch": 4, **arguments})


@pytest.mark.parametrize("shards", [0, "4", 2.5, True])
def test_a_window_of_shards_that_makes_no_sense(shards: Any) -> None:
    with pytest.raises(ConfigurationError, match="an integer of at least 1"):
        mesh.Blocks(shards)


@pytest.mark.parametrize("dataset", ["s3://misused/", [1, 2], None])
def test_what_is_no_dataset(dataset: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"mesh\.open"):
        mesh.Loader(dataset, 4)


@pytest.mark.parametrize("fields", [["x"], "bin", 5])
def test_fields_that_are_no_mapping(client: mesh.Client, fields: Any) -> None:
    with pytest.raises(ConfigurationError, match="a mapping of field names"):
        mesh.open(f"s3://{BUCKET}/", fields=fields, client=client)


@pytest.mark.parametrize("state", [None, 5, ["plan"], {}, "junk", {"model": {}}])
def test_what_is_no_state(ds: mesh.Dataset, state: Any) -> None:
    with mesh.Loader(ds, 4) as loader, pytest.raises(ConfigurationError, match="not a loader state"):
        loader.load_state_dict(state)


def test_numbers_of_numpy_and_devices_of_torch_are_taken(ds: mesh.Dataset) -> None:
    import torch

    four: Any = np.int64(4)
    place = torch.device("cpu")
    more: Any = {"device": place, "connections": np.int32(2), "shuffle": mesh.Blocks(four)}
    with mesh.Loader(ds, four, seed=four, **more) as loader:
        assert [found.rows for found in loader] == [4, 4, 4]
        assert isinstance(loader.global_batch, int)
        assert json.loads(json.dumps(loader.state_dict()))["seed"] == 4


def test_a_batch_that_no_epoch_fills_is_told(ds: mesh.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "meshsdk")
    with mesh.Loader(ds, 10), mesh.Loader(ds, 12, tail="ragged"):
        assert not caplog.records
    with mesh.Loader(ds, 12) as loader:
        assert [found.rows for found in loader] == [12]
    assert "more than the 10 samples" in caplog.text


def test_an_arena_without_room_ahead_is_told(ds: mesh.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "meshsdk")
    with mesh.Loader(ds, 4, prefetch_bytes=100_000):
        assert not caplog.records
    with mesh.Loader(ds, 4, prefetch_bytes=20_000) as loader:
        assert [found.rows for found in loader] == [4, 4, 4]
    assert "prefetch_bytes=20000 has no room for a second batch of" in caplog.text
    ragged = mesh.open(f"s3://{BUCKET}/", fields={"x": "bin"}, client=ds.client)
    caplog.clear()
    with mesh.Loader(ragged, 4, prefetch_bytes=1):  # how large its batches are is not known
        assert not caplog.records


def test_a_loader_that_was_made_before_the_ranks_met(
    ds: mesh.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would take itself for the only one."""
    given: Any = {"output": "numpy"}
    with (
        mesh.Loader(ds, 4, **given) as early,
        mesh.Loader(ds, 4, **given, rank=0, world=1) as alone,
        pickle.loads(pickle.dumps(early)) as sent,  # by mp.spawn, to a process that meets the others later
    ):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        uses: list[Callable[[], object]] = [
            lambda: iter(early),
            lambda: iter(sent),
            lambda: early.at(0),
            lambda: early.part(0, 0, 2),  # in a forked worker of a DataLoader
            lambda: pickle.dumps(early),  # for a spawned one
        ]
        for use in uses:
            with pytest.raises(
                ConfigurationError,
                match=r"rank 0 of 1, .* this process is rank 1 of 2: create the loader after",
            ):
                use()
        assert len(list(alone)) == 3
        with mesh.Loader(ds, 4, **given) as late:
            assert [found.rows for found in late] == [2, 2, 2]


def test_a_batch_is_no_tuple_and_no_tensor(ds: mesh.Dataset) -> None:
    with mesh.Loader(ds, 4) as loader:
        batch = loader.at(0)
    with pytest.raises(AttributeError, match=r"write batch\['x'\]"):
        batch.x  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="device='cuda'"):
        batch.cuda()  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="this batch has x"):
        batch["y"]


class Stranger(BaseHTTPRequestHandler):
    """A server that is no meshd."""

    body = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(404)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<!DOCTYPE HTML>\n<html><h1>Error response</h1>", "an HTML page"),
        (b"<Error><Code>NoSuchBucket</Code><Message>There is none.</Message></Error>", "There is none"),
        (b"", "NotFound"),
    ],
)
def test_an_endpoint_that_is_no_meshd(body: bytes, words: str) -> None:
    handler = type("Answering", (Stranger,), {"body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        with mesh.connect(endpoint, access_key="key", secret_key="secret") as client:
            with pytest.raises(NotFoundError, match="does not seem to be a meshd") as raised:
                mesh.open("s3://photos/", fields={"image": "jpg"}, client=client)
            client.close()
        server.shutdown()
        thread.join(60)
    assert words in str(raised.value)
    assert "<h1>" not in str(raised.value)


def test_keys_that_have_ended() -> None:
    for code in ("ExpiredToken", "InvalidToken"):
        error = server_error(400, code, "The provided token has expired.")
        assert isinstance(error, AccessError)
        assert "MESH_CREDENTIALS_FILE" in str(error) or "AWS_SESSION_TOKEN" in str(error)


def test_names_that_are_nearly_right() -> None:
    with pytest.raises(AttributeError, match="DataLoader") as raised:
        mesh.DataLoader  # type: ignore[attr-defined]  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("DataLoader", mesh)  # of which Python says what is near


def test_what_is_no_op_says_what_to_write(ds: mesh.Dataset) -> None:
    given: Any = ops.frombuffer
    with pytest.raises(ConfigurationError, match=r"ops\.frombuffer\('image'\)"):
        ds.map(given)
    with pytest.raises(ConfigurationError, match=r"Unpack the list: ds\.map\(\*those\)"):
        ds.map([ops.raw("x")])  # type: ignore[arg-type]

    def brighten(image: Any) -> Any:
        return image

    for function, name in ((brighten, "brighten"), (lambda image: image, "FUNCTION")):
        with pytest.raises(
            ConfigurationError, match=rf"mesh op push.*ops\.user\('FILE/{name}', .*loader\.map"
        ):
            ds.map(cast("Any", function))
    with pytest.raises(ConfigurationError, match=r"got str\. Ops are made by the functions of meshsdk\.ops"):
        ds.map(cast("Any", "decode"))


def test_classes_are_those_of_ops_or_it_says_what_has_some(client: mesh.Client, ds: mesh.Dataset) -> None:
    with pytest.raises(MeshError, match=r"'@class'.*open_coco\(…, classes=\[…\]\)"):
        _ = ds.classes
    found = mesh.open(f"s3://{BUCKET}/", fields={"x": "bin"}, client=client)
    assert found.map(ops.box_labels("x", "coco", classes=["dog", "cat"])).classes == ("dog", "cat")
    with pytest.raises(MeshError, match="named classes"):
        _ = found.map(ops.box_labels("x", "coco")).classes


def test_functions_and_texts_without_quotes_are_no_filters(ds: mesh.Dataset) -> None:
    with pytest.raises(ConfigurationError, match=r"'size > 10000'.*got function"):
        ds.filter(lambda sample: True)  # type: ignore[arg-type]
    with pytest.raises(InvalidPlanError, match=r"there is no 'red' \(put text in quotes\)"):
        ds.filter("name == red")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda ds: ds.join("s3://captions"), r"join takes a dataset, .* got str"),
        (lambda ds: ds.join(ds, on=5), r"on=5: expected an expression, such as on='stem', or two"),
        (lambda ds: ds.join(ds, on=("stem",)), r"or two, one for each side"),
        (lambda ds: ds.relabel(label="cat"), r"ds\.relabel\(label=\{'tabby': 'cat'.* got str"),
        (lambda ds: ds.split(a=0.5, by=5), r"by=5: expected an expression"),
        (lambda ds: mesh.mix(ds, ds, weights=cast("Any", 3)), r"weights=3: expected one number per dataset"),
        (
            lambda ds: mesh.mix(ds, ds, schedule=cast("Any", mesh.Stage([1, 1]))),
            r"schedule: expected a list of stages, .* got Stage",
        ),
        (
            lambda ds: mesh.mix(ds, ds, schedule=cast("Any", [(1, [1, 1])])),
            r"schedule: expected a list of stages, .* got tuple",
        ),
        (
            lambda ds: mesh.mix(ds, ds, schedule=[mesh.Stage([1, 1], step=-1)]),
            r"Stage\(step=-1\): expected an integer",
        ),
        (lambda ds: mesh.mix(ds, ds, schedule=[mesh.Stage([1, 1], step=cast("Any", 1.5))]), r"an integer"),
        (
            lambda ds: mesh.mix(ds, ds, schedule=[mesh.Stage([1, 1], step=1, position=3)]),
            r"pass `position` or `step`, not both",
        ),
        (
            lambda ds: mesh.mix(ds, ds, schedule=cast("Any", None)),
            r"schedule: expected a list of stages, .* got NoneType",
        ),
    ],
)
def test_structures_that_make_no_sense(ds: mesh.Dataset, made: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        made(ds)


def test_a_shorthand_that_is_none(client: mesh.Client) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown field '@klass': use \"@class\" for the folder"):
        mesh.open(f"s3://{BUCKET}/", fields={"x": "bin", "label": "@klass"}, client=client)


@pytest.mark.parametrize("name", ["shuffle", "batch", "repeat", "prefetch", "shard"])
def test_what_other_datasets_do_a_loader_does(ds: mesh.Dataset, name: str) -> None:
    with pytest.raises(AttributeError, match=r"loader"):
        getattr(ds, name)
    assert not hasattr(ds, "collate")


def test_a_loader_is_no_sequence(ds: mesh.Dataset) -> None:
    with mesh.Loader(ds, 4) as loader, pytest.raises(TypeError, match=r"loader\.as_iterable\(\)"):
        loader[0]


def test_a_field_to_normalize_that_is_not_there_or_no_image(ds: mesh.Dataset) -> None:
    with pytest.raises(ConfigurationError, match="no field 'image'; a batch has x"):
        mesh.Loader(ds, 4, output="torch", normalize=mesh.Normalize())
    with pytest.raises(ConfigurationError, match=r"'x' must be uint8 images of one size, but is uint8 \[4\]"):
        mesh.Loader(ds, 4, output="torch", normalize=mesh.Normalize("x"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("batch_size", "global_batch is"), ("num_workers", "leave it out"), ("drop_last", "tail=")],
)
def test_what_torchs_loader_calls_otherwise(ds: mesh.Dataset, name: str, words: str) -> None:
    with pytest.raises(TypeError, match=f"Loader has no argument {name}: .*{words}"):
        mesh.Loader(ds, **{name: 4})  # type: ignore[arg-type]
    with (
        mesh.Loader(ds, 4) as loader,
        pytest.raises(AttributeError, match=f"no attribute '{name}': .*{words}"),
    ):
        getattr(loader, name)
    with pytest.raises(
        TypeError, match=r"no argument batch_size: global_batch is .*; no argument pin_memory: device="
    ):
        mesh.Loader(ds, batch_size=4, shuffle=True, pin_memory=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'"):
        mesh.Loader(ds, 4, color=1)  # type: ignore[call-arg]


def test_batches_as_tuples(client: mesh.Client, ds: mesh.Dataset) -> None:
    whole = mesh.open(f"s3://{BUCKET}/", fields={"x": "bin"}, client=client).map(
        ops.frombuffer("x", "uint32")
    )
    pair = whole.rename(x="y").join(ds)
    with mesh.Loader(pair, 4, output="numpy", shuffle=False) as loader:
        tuples = loader.as_tuples("y", "x", "__status", "__pos")
        assert len(tuples) == 3
        found = list(tuples)
        assert [x[:, 0].tolist() for _, x, _, _ in found] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9, *found[2][1][2:, 0]],
        ]
        assert [y.dtype.name for y, *_ in found] == ["uint32"] * 3
        assert found[2][2].tolist() == [0, 0, 3, 3]
        assert [int(place) for *_, places in found for place in places][:10] == list(range(10))
        assert loader.epoch == 1
        with pytest.raises(ConfigurationError, match="no field 'z'; a batch has x, y, __pos"):
            loader.as_tuples("x", "z")
        with pytest.raises(ConfigurationError, match="no fields given"):
            loader.as_tuples()
        with pytest.warns(UserWarning, match=r'loader\.as_tuples\("x", "y"\)') as told:
            names = [(x, y) for x, y in loader]
        assert names == [("x", "y")] * 3
    assert {warning.filename for warning in told} == {__file__}


def test_set_epoch_behind_a_state_gives_up_its_place(
    ds: mesh.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    """The habit of torch's samplers: `for epoch in range(loader.epoch, 9): loader.set_epoch(epoch)`."""
    caplog.set_level(logging.WARNING, "meshsdk")
    with mesh.Loader(ds, 4, output="numpy") as loader:
        next(iter(loader))
        state = loader.state_dict()
        loader.set_epoch(0)  # as a validation does
        loader.load_state_dict({**state, "position": 0})
        loader.set_epoch(0)
        loader.load_state_dict(state)
        loader.set_epoch(1)
        loader.load_state_dict(state)
        next(iter(loader))
        loader.set_epoch(0)
        assert not caplog.records
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert [found.rows for found in loader] == [4, 4, 4]
    assert "the rows before position 4" in caplog.text
    with mesh.Loader(ds, 4) as loader, pytest.raises(IndexError, match="epochs are counted from 0"):
        loader.set_epoch(-1)


@pytest.mark.parametrize(
    ("url", "fields", "words"),
    [
        ("s3://misused/*.bin", None, "no wildcards: name the folder"),
        ("s3://misused/1.bin", {"x": "bin"}, r"if 1\.bin is a file, open its folder, s3://misused/\."),
        ("s3://misused/", {"x": "bin", "label": "class"}, 'write "@class" with the @'),
        ("s3://misused/nothing", {"x": "bin"}, "it is empty"),
        ("s3://misused/", {"x": "bin,dat"}, 'Semicolons separate several extensions of a field: "jpg;jpeg"'),
    ],
)
def test_what_was_meant_where_nothing_is_found(
    client: mesh.Client, url: str, fields: Any, words: str
) -> None:
    with pytest.raises(NotFoundError, match=words):
        mesh.open(url, fields=fields, client=client)


@pytest.mark.parametrize(("kind", "words"), [("tar", "no archive in"), ("parquet", "no Parquet file")])
def test_a_kind_of_which_there_is_nothing(client: mesh.Client, kind: Kind, words: str) -> None:
    with pytest.raises(NotFoundError, match=words):
        mesh.open(f"s3://{BUCKET}/", fields={"x": "bin"} if kind == "tar" else None, kind=kind, client=client)


def test_torchvision_s_names(ds: mesh.Dataset) -> None:
    class RandomHorizontalFlip:
        """As torchvision's."""

    given: Any = RandomHorizontalFlip()
    with pytest.raises(AttributeError, match=r"write ops\.random_resized_crop\(…\), with the field first"):
        ops.RandomResizedCrop  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"ds\.map\("):
        ops.Compose  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"attribute 'decoed'$"):
        ops.decoed  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ConfigurationError, match=r"got RandomHorizontalFlip\. Write ops\.hflip"):
        ds.map(given)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda o: o.resize("x", 224.0), "whole pixels"),
        (lambda o: o.resize("x", "224"), "whole pixels"),
        (lambda o: o.hflip("x", p="0.5"), "a probability"),
        (lambda o: o.rotate("x", "30"), "pass numbers"),
        (lambda o: o.pad("x", "3"), "pass numbers"),
        (lambda o: o.random_resized_crop("x", 224, scale=0.5), r"pass \(low, high\)"),
        (lambda o: o.color_jitter("x", brightness=(0.6, 1.4)), "brightness=.* must be a number"),
        (lambda o: o.normalize("x", mean="0.5", std=1), "mean='0.5'; pass numbers"),
    ],
)
def test_arguments_of_ops(made: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        made(ops)


def test_what_connects_is_looked_at_first() -> None:
    for given in ({"deadline": "10"}, {"timeout": "10"}, {"timeout": True}):
        with pytest.raises(ConfigurationError, match="seconds, such as 600"):
            mesh.connect("http://127.0.0.1:9", access_key="key", secret_key="secret", **given)
    with pytest.raises(ConfigurationError, match="expected a URL"):
        mesh.connect(9000)  # type: ignore[arg-type]


def test_what_is_no_bucket_and_no_bytes(client: mesh.Client, ds: mesh.Dataset) -> None:
    with pytest.raises(ConfigurationError, match="the bucket's name and the key as separate arguments"):
        next(client.list("s3://misused"))
    with pytest.raises(ConfigurationError, match=r"encode text with text\.encode\(\)"):
        client.put(BUCKET, "text", "text")  # type: ignore[arg-type]
    with pytest.raises(ServerError, match="mesh rm -r"):
        client.delete_bucket(BUCKET)
    with pytest.raises(ConfigurationError, match="fractions by name"):
        ds.split([0.9, 0.1])  # type: ignore[arg-type]


def test_samples_have_numbers(ds: mesh.Dataset) -> None:
    for index in (slice(0, 3), "x"):
        with pytest.raises(TypeError, match=r"ds\.head\(8\)"):
            ds[index]  # type: ignore[index]


def test_a_dataset_is_iterated_in_few_requests_and_bad_samples_come_at_their_turn(
    client: mesh.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        client.put(BUCKET, f"more/{number:02}.cls", b"?" if number == 12 else str(number).encode())
    found = mesh.open(f"s3://{BUCKET}/more", fields={"n": "cls"}, client=client)
    asked: list[int] = []
    fetch = mesh.Dataset.__getitems__

    def counted(ds: mesh.Dataset, indices: Any) -> Any:
        asked.append(len(indices))
        return fetch(ds, indices)

    monkeypatch.setattr(mesh.Dataset, "__getitems__", counted)
    assert [bytes(sample["n"]) for sample in found] == [b"?" if n == 12 else b"%d" % n for n in range(20)]
    assert asked == [1, 2, 4, 8, 5]
    samples = iter(found.map(ops.int_label("n")))
    assert [int(next(samples)["n"]) for _ in range(12)] == list(range(12))
    with pytest.raises(BadSampleError, match="more/12"):
        next(samples)


def test_names_that_are_given_as_a_list(ds: mesh.Dataset) -> None:
    with pytest.raises(ConfigurationError, match=r"ds\.select\('image', 'label'\); got list"):
        ds.select(["x"])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"ds\.rename\(jpg='image'\); got list"):
        ds.rename(["x"])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"two or more datasets, such as mesh\.mix\(.*; got list"):
        mesh.mix([ds, ds])  # type: ignore[arg-type]


def test_a_dataset_shows_what_is_done_to_it(ds: mesh.Dataset) -> None:
    many = ds.map(ops.text_label("x", [str(number) for number in range(100)])).at_epoch(2)
    assert "10 samples, x).frombuffer('x', dtype='uint8', shape=[4]).text_label('x', " in repr(many)
    assert repr(many).endswith("…).at_epoch(2)")


def test_rows_of_unequal_length_are_no_tensor(client: mesh.Client) -> None:
    found = mesh.open(f"s3://{BUCKET}/", fields={"x": "bin"}, client=client)
    with mesh.Loader(found, 4) as loader:
        ragged = loader.at(0)["x"]
    with pytest.raises(AttributeError, match=r"no attribute 'float': .*ops\.pad_to.*files.*ops\.int_label"):
        ragged.float()
    assert pickle.loads(pickle.dumps(ragged)).offsets.tolist() == ragged.offsets.tolist()
    assert not hasattr(ragged, "__array__")
