"""Answers of a megabyte, sent in the moment of the request: whole, and in order among others, however slowly
they are read."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.s3_raw import read_answers

if TYPE_CHECKING:
    from tests.support.s3_raw import Wire

SIZES = {"small": 10_000, "middle": 200_000, "large": 1 << 20, "larger": (1 << 20) + 1}


@pytest.fixture
def bodies(s3: Any, bucket: str) -> dict[str, bytes]:
    bodies = {name: os.urandom(size) for name, size in SIZES.items()}
    for name, body in bodies.items():
        s3.put_object(Bucket=bucket, Key=name, Body=body)
    return bodies


@pytest.mark.parametrize("receive_buffer", [None, 4096])
def test_answers_come_whole_and_in_order(
    wire: Wire, bucket: str, bodies: dict[str, bytes], receive_buffer: int | None
) -> None:
    rng = random.Random(7)
    for _ in range(4):
        asked = [rng.choice(list(bodies)) for _ in range(12)]
        sock = wire.connect(receive_buffer=receive_buffer)
        for name in asked:
            sock.sendall(wire.head("GET", f"/{bucket}/{name}"))
        answers = read_answers(sock, len(asked))
        assert [answer.status for answer in answers] == [200] * len(asked)
        for name, answer in zip(asked, answers, strict=True):
            assert answer.body == bodies[name]


def test_one_after_the_other(wire: Wire, bucket: str, bodies: dict[str, bytes]) -> None:
    sock = wire.connect()
    for name in ["large", "small", "middle", "large", "larger", "large"] * 5:
        sock.sendall(wire.head("GET", f"/{bucket}/{name}"))
        (answer,) = read_answers(sock, 1)
        assert answer.body == bodies[name]
