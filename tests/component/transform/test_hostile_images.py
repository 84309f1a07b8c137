"""Hostile images on a real daemon: each named and counted, the node up, other jobs' batches right."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.client.native_api import bad_samples
from meshsdk.client.s3_client import connect
from meshsdk.errors import BadSampleError
from tests.support.daemons import Daemon
from tests.support.hostile_images import encoded, hostile_images

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = hostile_images()
HONEST, SIDE = 64, 32
CHAIN = (ops.decode("image"), ops.random_resized_crop("image", SIDE), ops.hflip("image"))


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    started = Daemon.start(args=["--transform-workers", "2"], workers=1)
    with started as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESH_ENDPOINT", running.endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", running.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", running.secret_key)
        client = running.client()
        client.create_bucket(Bucket="hostile")
        client.create_bucket(Bucket="honest")
        for name, data in HOSTILE.items():
            client.put_object(Bucket="hostile", Key=f"{name}.img", Body=data)
        client.put_object(Bucket="hostile", Key="harmless.img", Body=encoded("PNG"))
        for number in range(HONEST):
            body = encoded(("JPEG", "PNG", "WEBP")[number % 3], 60 + number, 50)
            client.put_object(Bucket="honest", Key=f"{number:03d}.img", Body=body)
        yield running
        assert not re.search(r"Traceback|PIL|Warning", running.output()), "a file cannot write in the log"


def loader(bucket: str, batch: int, **options: Any) -> mesh.Loader:
    ds = mesh.open(f"s3://{bucket}", fields={"image": "img"}).map(*CHAIN)
    return mesh.Loader(ds, global_batch=batch, seed=3, **options)


def get(node: Daemon, path: str) -> tuple[int, str]:
    with contextlib.closing(node.connect()) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def failures(node: Daemon) -> float:
    _, text = get(node, "/metrics")
    found = re.findall(r'^meshd_transform_failures_total\{[^}]*op="decode[^}]*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


def test_each_is_named_and_counted_and_others_are_served_right(node: Daemon) -> None:
    transforms = {name: pid for name, pid in node.children().items() if "transform" in name}
    with loader("honest", HONEST) as honest:
        expected = [np.asarray(honest.at(0, epoch)["image"]).copy() for epoch in range(4)]
    before = failures(node)

    def honest_epoch(epoch: int) -> Any:
        with loader("honest", HONEST // 4) as other:  # other addresses, so nothing is kept from before
            return np.concatenate([np.asarray(other.at(step, epoch)["image"]) for step in range(4)])

    with ThreadPoolExecutor(5) as threads:
        meanwhile = [threads.submit(honest_epoch, epoch) for epoch in range(4)]
        with loader("hostile", len(HOSTILE) + 1, on_bad="mask", max_bad=1.0) as attack:
            batch = attack.at(0)
            status, images = np.array(batch.status.tolist()), np.asarray(batch["image"]).copy()
            plan = attack.plan.hash
        for epoch, found in enumerate(meanwhile):
            np.testing.assert_array_equal(found.result(60), expected[epoch])
    assert (status == 2).sum() == len(HOSTILE)
    assert images[status == 2].max() == 0
    assert images[status == 0].any()
    with connect() as client:
        ledger = bad_samples(client.transport, plan)
    assert {entry.key for entry in ledger} == set(HOSTILE)
    assert {entry.op.partition("+")[0] for entry in ledger} == {"decode"}
    assert all(entry.error for entry in ledger)
    assert failures(node) - before == len(HOSTILE)
    assert get(node, "/-/healthy")[0] == 200
    assert transforms
    assert {name: pid for name, pid in node.children().items() if "transform" in name} == transforms


@pytest.mark.parametrize("name", ["png-text", "jpeg-claims-more", "tiff-samples"])
def test_whoever_asks_is_told_which_and_why(node: Daemon, name: str) -> None:
    ds = mesh.open("s3://hostile", fields={"image": "img"}).map(*CHAIN)
    number = sorted([*HOSTILE, "harmless"]).index(name)
    one = mesh.Loader(ds, global_batch=1, seed=3, shuffle=False, on_bad="raise")
    with one, pytest.raises(BadSampleError, match=rf"{name} is bad: decode.*mesh replay"):
        one.at(number)


def test_a_view_refuses_them_by_name_and_lists_the_rest(node: Daemon) -> None:
    from meshsdk.admin import views

    chain: list[dict[str, Any]] = [
        {"op": "decode"},
        {"op": "resize", "args": {"size": [8, 8]}},
        {"op": "encode", "args": {"format": "png"}},
    ]
    document = views.transform_view(chain, match=[".img"], suffix=".png")
    with connect() as client:
        views.create_view(client.transport, "hostile", "small", document)
    s3 = node.client()
    listed = s3.list_objects_v2(Bucket="hostile--small").get("Contents", [])
    assert [entry["Key"] for entry in listed] == ["harmless.png"]
    with pytest.raises(s3.exceptions.ClientError, match="UnprocessableSource") as caught:
        s3.get_object(Bucket="hostile--small", Key="gif-canvas.png")
    assert "decode" in str(caught.value)
