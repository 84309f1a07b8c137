"""Batches as plain dictionaries of arrays or tensors, for libraries that know nothing of a Batch.

Law: nothing is copied and nothing is lost: a ragged field is `NAME.data`, `NAME.offsets` and, where rows have
several dimensions, `NAME.shapes`, as in a frame; which rows they are is `__pos` and `__status`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshsdk.batches import Ragged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshsdk.batches import Batch
    from meshsdk.loaders import Loader

POSITIONS, STATUS = "__pos", "__status"


def as_dict(batch: Batch) -> dict[str, Any]:
    """The fields by name, in their order, then positions and status."""
    plain: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(value, Ragged):
            plain[name] = value
            continue
        plain[f"{name}.data"], plain[f"{name}.offsets"] = value.data, value.offsets
        if value.shapes is not None:
            plain[f"{name}.shapes"] = value.shapes
    return {**plain, POSITIONS: batch.positions, STATUS: batch.status}


def plain_types(loader: Loader) -> dict[str, tuple[Any, tuple[int | None, ...]]]:
    """numpy's dtype and shape of what `as_dict` gives of this loader's batches, by a look at one of them; the
    first axis, whose length differs, is None."""
    looked = {name: np.asarray(value) for name, value in as_dict(loader.at(0)).items()}
    return {name: (value.dtype, (None, *value.shape[1:])) for name, value in looked.items()}


class PlainLoader:
    """A loader whose batches are plain dictionaries; length and state are the loader's own."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            yield as_dict(batch)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __repr__(self) -> str:
        return f"PlainLoader({self.loader!r})"
