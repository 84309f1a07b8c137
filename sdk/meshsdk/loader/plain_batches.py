"""Batches as plain dictionaries or tuples, for code that does not know `Batch`.

Law: nothing is copied, and a dictionary is complete: a ragged field becomes `NAME.data`, `NAME.offsets` and,
for several dimensions, `NAME.shapes`; `__pos` and `__status` have the positions and status of the rows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from meshsdk.datasets.batch import Ragged
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from meshsdk.datasets.batch import Batch
    from meshsdk.loader.loader import Loader

POSITIONS, STATUS = "__pos", "__status"


def as_dict(batch: Batch) -> dict[str, Any]:
    """Return the batch as a plain dict: the fields in their order, then "__pos" and "__status".

    A ragged field becomes `NAME.data`, `NAME.offsets` and, if its rows have several dimensions,
    `NAME.shapes`. Nothing is copied.
    """
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
    """Return the numpy dtype and shape of each entry of `as_dict` for this loader's batches.

    Fetches one batch to find them. The first axis, whose length varies, is None.
    """
    looked = {name: np.asarray(value) for name, value in as_dict(_coming(loader)).items()}
    return {name: (value.dtype, (None, *value.shape[1:])) for name, value in looked.items()}


def _coming(loader: Loader) -> Batch:
    """Fetch the next batch; if a resumed epoch has none left, the first one of the epoch after it."""
    return loader.at(loader.step) if loader.remaining else loader.at(0, loader.epoch + 1)


def as_tuple(batch: Batch, names: Sequence[str]) -> tuple[Any, ...]:
    """Return these fields of a batch as a tuple; "__pos" and "__status" are its positions and status."""
    rows = {POSITIONS: batch.positions, STATUS: batch.status}
    return tuple(rows[name] if name in rows else batch[name] for name in names)


class PlainLoader:
    """Wraps a loader so that its batches are plain dictionaries, or whatever `convert` returns.

    Length and state are those of the loader.
    """

    def __init__(self, loader: Loader, convert: Callable[[Batch], Any] = as_dict) -> None:
        self.loader = loader
        self.convert = convert

    def __iter__(self) -> Iterator[Any]:
        return map(self.convert, self.loader)  # a generator would keep the last batch's slot

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __repr__(self) -> str:
        return f"PlainLoader({self.loader!r})"


def as_tuples(loader: Loader, names: Sequence[str]) -> PlainLoader:
    """Wrap a loader so that its batches are tuples of these fields.

    Raises ConfigurationError for a field that does not exist.
    """
    known = (*loader.plan.fields, POSITIONS, STATUS)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = f"no field {unknown[0]!r}" if unknown else "no fields given"
        raise ConfigurationError(
            f"as_tuples: {wrong}; a batch has {', '.join(known)}. Example: loader.as_tuples('image', 'label')"
        )
    return PlainLoader(loader, partial(as_tuple, names=tuple(names)))
