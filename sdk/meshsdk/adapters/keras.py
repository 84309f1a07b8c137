"""Keras on any backend: tuples of a loader's batches for `fit`, and a callback that adds the loader's figures
to the logs.

Law: an epoch of `fit` is an epoch of the loader, as long as its steps are `len(loader)`. Figures are of one
epoch, not cumulative.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.loader.loader import Loader
    from meshsdk.loader_stats import LoaderStats


def _package() -> Any:
    try:
        return import_module("keras")
    except ImportError as error:
        raise ImportError("`keras` is not installed: pip install keras") from error


def endless_tuples(loader: Loader, *fields: str) -> Iterator[tuple[Any, ...]]:
    """Yield batches as tuples of these fields, epoch after epoch: `model.fit(endless_tuples(loader, "image",
    "label"), steps_per_epoch=len(loader), epochs=10)`."""
    batches = loader.as_tuples(*fields)
    while True:
        yield from batches


class DataStats(_package().callbacks.Callback):  # type: ignore[misc]
    """Adds what a loader did in each epoch to the epoch's logs: samples per second, the share of time spent
    waiting, and on what (`LoaderStats.scalars`).

    Put it before the callbacks that write logs: `callbacks=[DataStats(loader), TensorBoard("runs")]`.
    `History` has the figures, too.
    """

    def __init__(self, loader: Loader, prefix: str = "data/") -> None:
        super().__init__()
        self._loader, self._prefix = loader, prefix
        self._before: LoaderStats | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = self._loader.stats()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._loader.stats(since=self._before).scalars(self._prefix))
