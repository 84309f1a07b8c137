"""A Lightning data module whose loader position is part of Lightning's checkpoints, and a callback that logs
what its loader does.

Law: the loader does ranks, shuffling and resuming; Lightning neither samples nor splits. Lightning calls
the functions that create loaders after the process group exists. The package that the program imported is
used, `lightning` or `pytorch_lightning`, because their classes are incompatible.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshsdk.errors import ConfigurationError
from meshsdk.loader.plain_loader import PlainLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshsdk.loader.loader import Loader
    from meshsdk.loader_stats import LoaderStats

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
        self._training: Loader | None = None
        self._state: Mapping[str, Any] | None = None

    def train_dataloader(self) -> PlainLoader:
        self._training = self._train()
        if self._state is not None:
            self._training.load_state_dict(self._state)
            self._state = None
        return PlainLoader(self._training)

    def val_dataloader(self) -> Any:
        return PlainLoader(self._validation()) if self._validation is not None else []

    def state_dict(self) -> dict[str, Any]:
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._state = dict(state_dict) or None

    def teardown(self, stage: str) -> None:
        if self._training is not None:
            self._training.close()

    @property
    def training(self) -> Loader | None:
        """The loader of training, once Lightning has asked for it."""
        return self._training


class DataStats(_package().Callback):  # type: ignore[misc]
    """Logs the loader's figures of the last `every` steps through the Trainer's loggers: samples per second,
    the share of time spent waiting, and on what (`LoaderStats.scalars`).

    `Trainer(callbacks=[DataStats(every=50)])`, with a `MeshDataModule`. Steps are those of the optimizer,
    which may take several batches. Each rank's figures are its own; the loggers show those of rank 0.
    """

    def __init__(self, every: int = 50, prefix: str = "data/") -> None:
        super().__init__()
        if every < 1:
            raise ConfigurationError(f"every={every}: expected a number of steps, at least 1")
        self._every, self._prefix = every, prefix
        self._before: LoaderStats | None = None
        self._logged = 0  # the last step with figures, or the first one of the training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loader = self._loader(trainer)
        self._before = None if loader is None else loader.stats()
        self._logged = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loader, step = self._loader(trainer), trainer.global_step
        if loader is None or step // self._every == self._logged // self._every:
            return
        self._logged = step
        now = loader.stats()
        window = now if self._before is None else now - self._before
        self._before = now
        for logger in trainer.loggers:
            logger.log_metrics(window.scalars(self._prefix), step=step)

    @staticmethod
    def _loader(trainer: Any) -> Loader | None:
        module = trainer.datamodule
        return module.training if isinstance(module, MeshDataModule) else None
