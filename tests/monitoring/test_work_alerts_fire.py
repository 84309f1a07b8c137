"""Alerts that clients and what they bring cause: slow reads, starving training, crashing ops, an origin that
fails. As test_alerts_fire.py."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import BotoCoreError, ClientError

import meshsdk as mesh
from meshsdk import ops
from meshsdk.admin import op_catalog
from meshsdk.errors import MeshError
from meshwire.origin import ANONYMOUS
from tests.monitoring.alert_watch import netloc, watched
from tests.support.daemons import Daemon
from tests.support.hostile_origin import HostileOrigin, head, honest
from tests.support.required import required_program
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.alert_watch import Watch

pytestmark = [required_program("prometheus", "apt install prometheus"), pytest.mark.timeout(300)]
LARGE = 8 << 20
SAMPLES = 24
OF_WORK = {"SlowReads", "TrainingStarves", "UserOpsFail", "OriginFails"}
SOURCE = b'''
import ctypes
import time
import numpy as np
from meshsdk.userops import BYTES, array, op

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def crash(data):
    """Ends its process."""
    ctypes.string_at(0)

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def slow(data):
    """Takes its time."""
    time.sleep(0.2)
    return np.int64(len(data))
'''


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start() as running:
        client = running.client()
        client.create_bucket(Bucket="samples")
        for number in range(SAMPLES):
            client.put_object(Bucket="samples", Key=f"{number:02}.bin", Body=b"1" * (number + 1))
        client.put_object(Bucket="samples", Key="large", Body=os.urandom(LARGE))
        yield running


@pytest.fixture(scope="module")
def sdk(node: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(node.endpoint, access_key=node.access_key, secret_key=node.secret_key) as client:
        op_catalog.push_module(client.transport, "mine", SOURCE)
        yield client


@pytest.fixture(scope="module")
def watch(node: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    with watched(tmp_path_factory.mktemp("prometheus"), [node]) as found:
        yield found


def _dataset(sdk: mesh.Client, op: str) -> mesh.Dataset:
    return mesh.open("s3://samples/", fields={"x": "bin"}, client=sdk).map(ops.user(f"mine/{op}", "x"))


def test_all_is_silent_before(watch: Watch, node: Daemon) -> None:
    assert not (watch.firing(netloc(node)) | watch.firing()) & OF_WORK


def test_a_job_that_waits_for_a_slow_op(watch: Watch, sdk: mesh.Client) -> None:
    seeds = count()

    def epoch() -> None:
        with mesh.Loader(_dataset(sdk, "slow"), 8, output="numpy", report="slow", seed=next(seeds)) as loader:
            assert sum(batch.rows for batch in loader) == SAMPLES

    watch.expect("TrainingStarves", again=epoch)


def test_an_op_that_ends_its_process(watch: Watch, node: Daemon, sdk: mesh.Client) -> None:
    seeds = count()

    def crash() -> None:
        with suppress(MeshError):
            mesh.Loader(
                _dataset(sdk, "crash"), global_batch=2, seed=next(seeds), on_bad="mask", max_bad=1.0
            ).at(0)

    watch.expect("UserOpsFail", node=node, again=crash)


def test_an_origin_that_fails(watch: Watch, node: Daemon) -> None:
    numbers = count()
    with HostileOrigin() as origin:
        origin.answer = honest(b"1")
        document = {"url": "s3://far/fails", "endpoint": origin.endpoint, "credentials": ANONYMOUS}
        assert node.request("PUT", "/-/buckets/fails", json.dumps(document).encode()).status == 200
        origin.answer = lambda _: iter((head("500 Internal Server Error", "content-length: 0"),))

        def read() -> None:
            with suppress(ClientError, BotoCoreError):
                node.client().get_object(Bucket="fails", Key=f"{next(numbers)}")

        watch.expect("OriginFails", node=node, again=read)


def test_clients_that_read_slowly(watch: Watch, node: Daemon) -> None:
    """A GET counts until its last byte."""
    wire = Wire(node.endpoint, node.access_key, node.secret_key)

    def read() -> None:
        sock = wire.connect(receive_buffer=8192)
        sock.sendall(wire.head("GET", "/samples/large"))
        time.sleep(4.0)
        left = LARGE
        while left > 0 and (data := sock.recv(1 << 20)):
            left -= len(data)
        sock.close()

    watch.expect("SlowReads", again=read)
    wire.close()
