"""The fuzzers' corpora, replayed: what was once found stays fixed. A taste of mutation, always the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.fuzz.corpora import CORPORA, corpus
from tests.fuzz.mutating import mutated
from tests.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = [(name, path) for name in TARGETS for path in corpus(name)]


@pytest.mark.parametrize(("name", "path"), INPUTS, ids=lambda value: str(getattr(value, "name", value)))
def test_replayed(name: str, path: Path) -> None:
    TARGETS[name].run(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_mutated(name: str) -> None:
    source, target = random.Random(7), TARGETS[name]
    inputs = [path.read_bytes() for path in corpus(name)]
    assert len(inputs) >= 3, "a corpus to begin with"
    for _ in range(400):
        target.run(mutated(source, inputs, target.words, target.limit))


def test_every_corpus_has_a_target_and_is_small() -> None:
    for folder in CORPORA.iterdir():
        assert folder.name in {*TARGETS, "wire"}
        sizes = [path.stat().st_size for path in corpus(folder.name)]
        assert sum(sizes) < 200_000
        assert len(sizes) <= 150
