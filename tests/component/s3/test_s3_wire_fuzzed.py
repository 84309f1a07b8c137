"""Broken heads on real connections: the daemon answers in HTTP or hangs up, and goes on serving."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.fuzz import wire
from tests.fuzz.corpora import corpus
from tests.fuzz.mutating import mutated
from tests.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from tests.support.daemons import Daemon


def test_the_corpus_and_its_children(daemon: Daemon) -> None:
    inputs = [path.read_bytes() for path in corpus("wire")]
    assert len(inputs) >= 8
    for data in inputs:
        wire.send(daemon, data)
    source = random.Random(7)
    for _ in range(150):
        wire.send(daemon, mutated(source, inputs, TARGETS["request"].words, 4096))
    wire.alive(daemon)


def test_other_versions_of_http_are_refused(daemon: Daemon) -> None:
    for version in ("0.9", "2.0"):
        for path in ("/", "/bucket/key", "/-/healthy"):
            answer = wire.send(daemon, f"GET {path} HTTP/{version}\r\nHost: h\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 400 "), answer
