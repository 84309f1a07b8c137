"""Users' ops on a real daemon: run in plans and views; their crashes contained."""

from __future__ import annotations

import io
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from botocore.exceptions import ClientError
from PIL import Image

import meshsdk
from meshsdk import ops
from meshsdk.admin import op_catalog
from meshsdk.cli import run
from meshsdk.errors import (
    BadSampleError,
    InvalidPlanError,
    MeshError,
    NotFoundError,
    ServerError,
)
from tests.support.bounded_wait import await_end, await_true
from tests.support.userops_module import COUNT, SOURCE, children_of, dataset, sizes, trap

if TYPE_CHECKING:
    from meshsdk.client.s3_client import Client
    from tests.support.daemons import Daemon


# --- plans and views ------------------------------------------------------------------------------------


def test_a_plan_runs_it_as_the_function_itself_would(client: Client, pushed: op_catalog.Pushed) -> None:
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    ds = dataset(client).map(ops.decode("image"), ops.user("mine/brighten", "image", gain=2.0))
    for number in (0, 7, COUNT - 1):
        plain = dataset(client).map(ops.decode("image"))[number]["image"]
        expected = names["brighten"](np.asarray(plain), gain=2.0)
        assert np.array_equal(np.asarray(ds[number]["image"]), expected)


def test_random_ones_draw_the_same_for_every_world_size(client: Client, pushed: op_catalog.Pushed) -> None:
    ds = dataset(client).map(ops.decode("image"), ops.user("mine/patch", "image", size=8))
    whole = np.asarray(meshsdk.Loader(ds, global_batch=12, seed=3).at(1)["image"])
    assert whole.shape == (12, 3, 8, 8)
    assert whole.dtype == np.float32
    parts = [
        np.asarray(meshsdk.Loader(ds, global_batch=12, seed=3, rank=rank, world=3).at(1)["image"])
        for rank in range(3)
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(np.asarray(meshsdk.Loader(ds, global_batch=12, seed=4).at(1)["image"]), whole)


def test_a_plan_keeps_the_build_it_was_made_with(client: Client, pushed: op_catalog.Pushed) -> None:
    before = dataset(client).map(ops.user("mine/trap", "image", on=[], how=""))
    loader = meshsdk.Loader(before, global_batch=4, seed=1, shuffle=False)
    was = np.asarray(loader.at(0)["image"]).tolist()
    newer = op_catalog.push_module(
        client.transport, "mine", SOURCE.replace(b"np.int64(len(data))", b"np.int64(-1)")
    )
    assert newer.version != pushed.version
    fresh = meshsdk.Loader(before, global_batch=4, seed=1, shuffle=False)
    assert np.asarray(fresh.at(0)["image"]).tolist() == [-1] * 4
    assert np.asarray(loader.at(1)["image"]).tolist() == sizes()[4:8]
    assert was == sizes()[:4]
    old = ops.user("mine/trap", "image", version=pushed.version, on=[], how="")
    pinned = meshsdk.Loader(dataset(client).map(old), global_batch=4, seed=1, shuffle=False)
    assert np.asarray(pinned.at(0)["image"]).tolist() == was


def test_a_build_that_was_removed_is_refused_until_it_is_pushed_again(
    client: Client, pushed: op_catalog.Pushed
) -> None:
    ds = trap(client, "", [])
    loader = meshsdk.Loader(ds, global_batch=4, seed=1, shuffle=False)
    loader.at(0)
    assert op_catalog.remove_module(client.transport, "mine", pushed.version) == (pushed.version,)
    for step in (0, 1):  # the first is in the node's cache of frames
        with pytest.raises(InvalidPlanError, match="push the same file again") as caught:
            loader.at(step)
        assert (caught.value.status, caught.value.code) == (410, "UnknownOpBuild")
    with pytest.raises(InvalidPlanError, match="there is no op 'mine/trap'"):
        trap(client, "", []).plan()
    again = op_catalog.push_module(client.transport, "mine", SOURCE)
    assert (again.version, again.new) == (pushed.version, True)
    assert np.asarray(loader.at(1)["image"]).tolist() == sizes()[4:8]


def test_an_argument_of_bytes_is_an_objects_content(client: Client, pushed: op_catalog.Pushed) -> None:
    client.put("photos", "tables/a", b"100 200")
    client.put("photos", "tables/b", b"7")

    def values(**args: str) -> list[int]:
        ds = dataset(client).map(ops.user("mine/listed", "image", **args))
        return list(map(int, meshsdk.Loader(ds, global_batch=8, seed=1, shuffle=False).at(0)["image"]))

    expected = [[100, 200][size % 2] for size in sizes()[:8]]
    assert values(table="s3://photos/tables/a") == expected
    assert values(table="s3://photos/tables/a", other="s3://photos/tables/b") == [v + 7 for v in expected]
    client.put("photos", "tables/a", b"1 2")
    assert values(table="s3://photos/tables/a") == [[1, 2][size % 2] for size in sizes()[:8]]
    with pytest.raises(NotFoundError, match="tables/none"):
        values(table="s3://photos/tables/none")


@pytest.mark.usefixtures("signed")
def test_views_run_it_too(daemon: Daemon, client: Client, pushed: op_catalog.Pushed) -> None:
    chain = ["--op", "decode", "--op", "mine/brighten gain=2", "--op", "encode format=png"]
    keys = ["--match", ".jpg", "--suffix", ".png", "--endpoint-url", daemon.endpoint]
    assert run(["view", "create", "photos--bright", *keys, *chain]) == 0
    body = daemon.client().get_object(Bucket="photos--bright", Key="train/0003.png")["Body"].read()
    plain = np.asarray(dataset(client).map(ops.decode("image"))[3]["image"])
    with Image.open(io.BytesIO(body)) as picture:
        expected = np.clip(plain.reshape(picture.height, picture.width, 3) * 2.0, 0, 255)
        assert np.array_equal(np.asarray(picture), expected.astype(np.uint8))
    op_catalog.remove_module(client.transport, "mine", pushed.version)
    again = daemon.client().get_object(Bucket="photos--bright", Key="train/0003.png")["Body"].read()
    assert again == body  # it was made before
    with pytest.raises(ClientError, match="push the same file again") as caught:
        daemon.client().get_object(Bucket="photos--bright", Key="train/0004.png")
    assert caught.value.response["Error"]["Code"] == "ViewOutdated"
    daemon.client().delete_bucket(Bucket="photos--bright")


# --- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("crash", r"its process ended \(SIGSEGV\) at mine.py, line \d+ in trap, twice"),
        ("hang", r"took longer than 2.5 s for one sample, twice: write @op\(…, seconds=N\), .* at most 30"),
        ("leak", r"more than the 128 MiB of memory .*, twice: write @op\(…, memory=BYTES\), .* 4096 MiB"),
        ("raise", r"RuntimeError: no good \(mine.py:\d+\)"),
        ("refuse", "not mine"),
    ],
)
def test_a_sample_it_fails_on_is_bad_named_and_stood_in_for(
    client: Client, pushed: op_catalog.Pushed, how: str, reason: str
) -> None:
    bad = sizes()[5]
    ds = trap(client, how, [bad])
    with pytest.raises(BadSampleError, match=reason) as caught:
        meshsdk.Loader(ds, global_batch=8, seed=1, shuffle=False, on_bad="raise").at(0)
    assert caught.value.detail["op"] == "mine/trap"
    assert "train/0005" in caught.value.detail["key"]
    batch = meshsdk.Loader(ds, global_batch=8, seed=1, shuffle=False).at(0)
    values = np.asarray(batch["image"]).tolist()
    expected = sizes()[:8]
    assert values[:5] + values[6:] == expected[:5] + expected[6:]
    assert values[5] in set(sizes()) - {bad}
    assert batch.status.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


LIMITED = """
import socket, threading
from meshsdk.userops import BYTES, op

@op(input=BYTES, output=BYTES)
def refused(data, *, how: str):
    \"\"\"What an op may not do.\"\"\"
    if how == "file":
        open("/etc/passwd")
    if how == "network":
        try:
            socket.create_connection(("127.0.0.1", 9))
        except OSError as error:
            raise ValueError("no answer") from error
    if how == "thread":
        threading.Thread(target=print).start()
    if how == "module":
        import nosuchmodule
    raise RuntimeError("not refused")
"""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("file", r"PermissionError: .*/etc/passwd' \((an op has no files|no files can be opened here)"),
        ("network", r"ValueError: no answer \(an op has no files, network, threads or programs\)"),
        ("thread", r"can't start new thread \(an op has no files, network, threads or programs\)"),
        ("module", r"No module named 'nosuchmodule' \((the node lacks it: push it along|no files)"),
        ("nothing", r"RuntimeError: not refused \(limited.py:\d+\)"),
    ],
)
def test_what_an_op_may_not_do_is_told_as_such(
    client: Client, pushed: op_catalog.Pushed, how: str, reason: str
) -> None:
    op_catalog.push_module(client.transport, "limited", LIMITED)
    ds = meshsdk.open("s3://photos/train", fields={"image": "jpg"}, client=client)
    with pytest.raises(BadSampleError, match=reason):
        _ = ds.map(ops.user("limited/refused", "image", how=how))[0]


def test_an_op_that_lies_is_the_ops_defect(client: Client, pushed: op_catalog.Pushed) -> None:
    with pytest.raises(ServerError, match="mine/trap") as caught:
        meshsdk.Loader(trap(client, "lie", [sizes()[2]]), global_batch=4, seed=1, shuffle=False).at(0)
    assert caught.value.code == "OpFailed"


def test_other_jobs_batches_are_right_while_it_crashes(client: Client, pushed: op_catalog.Pushed) -> None:

    honest = meshsdk.Loader(dataset(client).map(ops.decode("image")), global_batch=6, seed=5)
    expected = [[np.asarray(image) for image in honest.at(step)["image"]] for step in range(4)]
    crashing = trap(client, "crash", sizes())
    failures: list[Exception] = []

    def crash() -> None:
        for seed in range(2):
            try:
                meshsdk.Loader(crashing, global_batch=6, seed=seed, on_bad="mask", max_bad=1.0).at(0)
            except MeshError as error:
                failures.append(error)

    thread = threading.Thread(target=crash)
    thread.start()
    other = meshsdk.Loader(
        dataset(client).map(ops.decode("image"), ops.vflip("image", 0.0)), global_batch=6, seed=5
    )
    for step in range(4):
        for got, wanted in zip(other.at(step)["image"], expected[step], strict=True):
            assert np.array_equal(np.asarray(got), wanted)
    await_end(thread)
    assert failures == []


def test_its_processes_die_with_the_transforms(
    daemon: Daemon, client: Client, pushed: op_catalog.Pushed
) -> None:
    loader = meshsdk.Loader(trap(client, "", []), global_batch=4, seed=9)
    loader.at(0)
    transform = daemon.children()["transform-0"]
    confined = children_of(transform)
    assert 1 <= len(confined) <= 4
    for pid in confined:
        assert daemon.secret_key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    os.kill(transform, signal.SIGKILL)
    await_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in confined))
    assert len(loader.at(1)["image"]) == 4
