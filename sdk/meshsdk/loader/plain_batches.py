"""Batches as plain dictionaries or tuples, for code that knows nothing of `Batch`.

Law: nothing is copied, and a dictionary leaves nothing out: a ragged field becomes `NAME.data`,
`NAME.offsets` and, for several dimensions, `NAME.shapes`; `__pos` and `__status` say which rows they
are.
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
    looked = {name: np.asarray(value) for name, value in as_dict(_coming(loader)).items()}
    return {name: (value.dtype, (None, *value.shape[1:])) for name, value in looked.items()}


def _coming(loader: Loader) -> Batch:
    """The batch that comes next. Of a resumed epoch there may be none, its step 0 neither: then of the epoch
    after it, which has one."""
    return loader.at(loader.step) if loader.remaining else loader.at(0, loader.epoch + 1)


def as_tuple(batch: Batch, names: Sequence[str]) -> tuple[Any, ...]:
    """Fields of a batch in this order; "__pos" and "__status" are its positions and status."""
    rows = {POSITIONS: batch.positions, STATUS: batch.status}
    return tuple(rows[name] if name in rows else batch[name] for name in names)


class PlainLoader:
    """A loader whose batches are plain dictionaries, or what `convert` makes of them; length and state are
    the loader's own."""

    def __init__(self, loader: Loader, convert: Callable[[Batch], Any] = as_dict) -> None:
        self.loader = loader
        self.convert = convert

    def __iter__(self) -> Iterator[Any]:
        return map(self.convert, self.loader)  # a generator would hold the last batch's slot

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __repr__(self) -> str:
        return f"PlainLoader({self.loader!r})"


def as_tuples(loader: Loader, names: Sequence[str]) -> PlainLoader:
    """A loader whose batches are tuples of these fields. Raises ConfigurationError for one that is not
    there."""
    known = (*loader.plan.fields, POSITIONS, STATUS)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = f"no field {unknown[0]!r}" if unknown else "which fields"
        raise ConfigurationError(
            f"as_tuples: {wrong}; a batch has {', '.join(known)}: loader.as_tuples('image', 'label')"
        )
    return PlainLoader(loader, partial(as_tuple, names=tuple(names)))
