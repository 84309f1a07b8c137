"""A source is opened again: listings are known over restarts and in every worker, and each change of the
bucket is seen by the next `open`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPEN = json.dumps({"source": "s3://many", "kind": "objects", "fields": {"text": {"ext": ["txt"]}}}).encode()
KEYS = 12


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as found:
        client = found.client()
        client.create_bucket(Bucket="many")
        for number in range(KEYS):
            client.put_object(Bucket="many", Key=f"{number:03}.txt", Body=b"%03d" % number)
        yield found


def opened(daemon: Daemon) -> tuple[str, int]:
    """Name and samples; several connections, so that both workers are asked."""
    answers = list[Any]()
    for _ in range(6):
        answer = daemon.request("POST", "/-/snapshots", OPEN)
        assert answer.status == 200, answer.body
        answers.append(json.loads(answer.body))
    found = {(each["snapshot"], each["samples"]) for each in answers}
    assert len(found) == 1
    return found.pop()


def test_each_change_is_seen_also_after_a_restart(daemon: Daemon) -> None:
    client = daemon.client()
    changes: list[tuple[Callable[[], object], int]] = [
        (lambda: client.put_object(Bucket="many", Key="003.txt", Body=b"new"), 0),
        (lambda: client.put_object(Bucket="many", Key="900.txt", Body=b"more"), 1),
        (lambda: client.delete_object(Bucket="many", Key="900.txt"), -1),
        (lambda: client.delete_object(Bucket="many", Key="000.txt"), -1),
    ]
    name, samples = opened(daemon)
    assert samples == KEYS
    for change, more in changes:
        daemon.restart()
        assert opened(daemon) == (name, samples)
        change()
        before = name
        name, samples = opened(daemon)[0], samples + more
        assert name != before
        assert opened(daemon) == (name, samples)
    daemon.restart()
    change, _ = changes[0]
    client.put_object(Bucket="many", Key="003.txt", Body=b"newer")
    assert opened(daemon)[0] != name
