"""A Lightning data module whose loader position is part of Lightning's checkpoints.

Law: the loader does ranks, shuffling and resuming; Lightning neither samples nor splits. Lightning calls
the functions that create loaders after the process group exists. The package that the program imported is
used, `lightning` or `pytorch_lightning`, because their classes are incompatible.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshsdk.loader.loader import PlainLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshsdk.loader.loader import Loader

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _package() -> Any:
    imported = [name for name in _NAMES if name in sys.modules]
    for name in imported or _NAMES:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ImportError("neither `lightning` nor `pytorch_lightning` is installed: pip install lightning")


class MeshDataModule(_package().LightningDataModule):  # type: ignore[misc]
    """A data module: `Trainer(use_distributed_sampler=False).fit(model, MeshDataModule(train,
    validation))`.

    `train` and `validation` each create a `mesh.Loader`. A step receives a plain dictionary (see
    `plain.as_dict`). A checkpoint contains the position of the training loader and resumes there with any
    number of ranks.
    """

    def __init__(self, train: Callable[[], Loader], validation: Callable[[], Loader] | None = None) -> None:
        super().__init__()
        self._train, self._validation = train, validation
        self._training: PlainLoader | None = None
        self._state: Mapping[str, Any] | None = None

    def train_dataloader(self) -> PlainLoader:
        self._training = PlainLoader(self._train())
        if self._state is not None:
            self._training.load_state_dict(self._state)
            self._state = None
        return self._training

    def val_dataloader(self) -> Any:
        return PlainLoader(self._validation()) if self._validation is not None else []

    def state_dict(self) -> dict[str, Any]:
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._state = dict(state_dict) or None

    def teardown(self, stage: str) -> None:
        if self._training is not None:
            self._training.loader.close()
