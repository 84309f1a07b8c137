"""Broken heads on real connections: the daemon answers in HTTP or hangs up, and goes on serving."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.fuzz import wire
from tests.fuzz.corpora import corpus
from tests.fuzz.mutating import mutated
from tests.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from meshd.testing.daemons import Daemon


def test_the_corpus_and_its_children(daemon: Daemon) -> None:
    inputs = [path.read_bytes() for path in corpus("wire")]
    assert len(inputs) >= 8
    for data in inputs:
        wire.send(daemon, data)
    source = random.Random(7)
    for _ in range(150):
        wire.send(daemon, mutated(source, inputs, TARGETS["request"].words, 4096))
    wire.alive(daemon)
