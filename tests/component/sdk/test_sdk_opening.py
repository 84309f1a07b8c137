"""What `mesh.open` does while a node lists: the loader's modules are loaded, and the answer is read after."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest

from meshsdk import Loader, open_dataset
from meshsdk.errors import DeadlineError
from tests.component.sdk.test_sdk_scripted import SAMPLES, ScriptedMesh

PATIENCE = 60.0


class Listing(ScriptedMesh):
    """`listing`: it was asked for a snapshot; it answers when `loaded` is set. `cuts`: connections that end
    before."""

    def __init__(self, cuts: int = 0) -> None:
        super().__init__()
        self.listing, self.loaded = threading.Event(), threading.Event()
        self.cuts, self.questions = cuts, 0

    def summary(self) -> dict[str, Any]:
        self.questions += 1
        self.listing.set()
        if self.questions <= self.cuts:
            raise ConnectionAbortedError("as the test wants it")
        assert self.loaded.wait(PATIENCE)
        return super().summary()


def _load(server: Listing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading ends when the question is there, and the answer comes when loading has ended."""

    def load() -> type[Loader]:
        assert server.listing.wait(PATIENCE)
        server.loaded.set()
        return Loader

    monkeypatch.setattr(open_dataset, "_load_loader", load)


def test_modules_are_loaded_while_the_node_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Listing()) as server:
        _load(server, monkeypatch)
        assert len(server.dataset()) == SAMPLES
        assert server.questions == 1


def test_an_answer_that_breaks_off_meanwhile_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Listing(cuts=2)) as server:
        _load(server, monkeypatch)
        assert len(server.dataset()) == SAMPLES
        assert server.questions == 3


def test_nobody_there_is_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Listing()
    server.close()
    monkeypatch.setattr(open_dataset, "_load_loader", lambda: Loader)
    with pytest.raises(DeadlineError):
        open_dataset.open("s3://photos/train", {"a": "jpg"}, client=server.client(deadline=0.5))
