"""A loader as the start of a Grain pipeline, for JAX.

Law: the iterator's state is the loader's own, so a checkpoint of Grain or Orbax resumes with any number of
processes. Batches are plain dictionaries of numpy arrays.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import grain

from meshsdk.datasets.batch import as_dict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.loader.loader import Loader


class LoaderDataset(grain.IterDataset):
    """A Grain dataset: `LoaderDataset(mesh.Loader(ds, 256, output="numpy")).map(…)`; an iterator yields
    (the rest of) an epoch.

    Grain's own prefetching (`mp_prefetch`) is not needed, because the loader prefetches.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.loader = loader

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self.loader)

    def __repr__(self) -> str:
        return f"LoaderDataset({self.loader!r})"


class LoaderIterator(grain.DatasetIterator):
    """One pass over the loader; it starts with the first batch requested, so that a state can be set
    before."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.loader = loader
        self._batches: Any = None

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = iter(self.loader)
            # Grain keeps iterators until interpreter shutdown is half done, so end the pass before that.
            weakref.finalize(self, self._batches.close)
        return as_dict(next(self._batches))

    def get_state(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._batches = None

    def close(self) -> None:
        """End the pass; the loader stays usable."""
        if self._batches is not None:
            self._batches.close()
