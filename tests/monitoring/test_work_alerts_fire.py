"""Alerts that clients and what they bring cause: slow reads, starving training, crashing ops, an origin that
fails. As test_alerts_fire.py."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from itertools import count
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import BotoCoreError, ClientError

import meshsdk as mesh
from meshwire.origin import ANONYMOUS
from tests.monitoring.alert_watch import netloc, watched
from tests.monitoring.client_failures import ClientFailures, read_late
from tests.support.daemons import Daemon
from tests.support.hostile_origin import HostileOrigin, head, honest
from tests.support.required import required_program
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.alert_watch import Watch

pytestmark = [required_program("prometheus", "apt install prometheus"), pytest.mark.timeout(300)]
OF_WORK = {"SlowReads", "TrainingStarves", "UserOpsFail", "OriginFails"}


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start() as running:
        yield running


@pytest.fixture(scope="module")
def failures(node: Daemon) -> Iterator[ClientFailures]:
    with mesh.connect(node.endpoint, access_key=node.access_key, secret_key=node.secret_key) as client:
        yield ClientFailures(client)


@pytest.fixture(scope="module")
def watch(node: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    with watched(tmp_path_factory.mktemp("prometheus"), [node]) as found:
        yield found


def test_all_is_silent_before(watch: Watch, node: Daemon) -> None:
    assert not (watch.firing(netloc(node)) | watch.firing()) & OF_WORK


def test_a_job_that_waits_for_a_slow_op(watch: Watch, failures: ClientFailures) -> None:
    watch.expect("TrainingStarves", again=failures.starve)


def test_an_op_that_ends_its_process(watch: Watch, node: Daemon, failures: ClientFailures) -> None:
    watch.expect("UserOpsFail", node=node, again=failures.crash)


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


@pytest.mark.usefixtures("failures")
def test_clients_that_read_slowly(watch: Watch, node: Daemon) -> None:
    with closing(Wire(node.endpoint, node.access_key, node.secret_key)) as wire:
        watch.expect("SlowReads", again=lambda: read_late(wire))
