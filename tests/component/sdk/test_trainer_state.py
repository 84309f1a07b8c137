"""The loader's state in a checkpoint of a Trainer: whole or absent, whenever the process is killed."""

from __future__ import annotations

import json
import resource
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk.adapters.huggingface import STATE, FedByLoader
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class _Loader:
    rank = 0

    def __init__(self) -> None:
        self.position, self.resumed = 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"plan": "0" * 64, "position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.resumed = state


class _Trainer:
    """What `FedByLoader` uses of a Trainer."""

    def __init__(self, output: Path) -> None:
        self.args = SimpleNamespace(output_dir=str(output), ignore_data_skip=False)
        self.state = SimpleNamespace(global_step=3)

    def _save_checkpoint(self) -> None:
        return None

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        return None


class _MeshTrainer(FedByLoader, _Trainer):
    pass


def _trainer(output: Path, loader: Any) -> _MeshTrainer:
    return _MeshTrainer(output, loader=loader, inputs=dict)


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """Within this context no file can grow beyond `size` bytes: a write stops there, as if killed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_state_is_whole_or_absent(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    loader = _Loader()
    trainer = _trainer(tmp_path, loader)
    with _files_of_at_most(20), pytest.raises(OSError, match="File too large"):
        trainer._save_checkpoint()
    assert list(folder.iterdir()) == []
    trainer._save_checkpoint()
    first = loader.state_dict()
    loader.position = 8
    with _files_of_at_most(20), pytest.raises(OSError, match="File too large"):
        trainer._save_checkpoint()
    assert [path.name for path in folder.iterdir()] == [STATE]
    assert json.loads((folder / STATE).read_text()) == first
    trainer._save_checkpoint()
    trainer.train(str(folder))
    assert loader.resumed == loader.state_dict()


def test_a_state_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _Loader())
    with pytest.raises(ConfigurationError, match=r"has no mesh_loader\.json"):
        trainer.train(str(tmp_path))
    (tmp_path / STATE).write_text('{"plan": "000')
    with pytest.raises(ConfigurationError, match=r"mesh_loader.json is damaged .*earlier checkpoint"):
        trainer.train(str(tmp_path))
