"""PlainLoader: a loader whose batches are plain dictionaries, for programs that take any iterable."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from meshsdk.datasets.batch import POSITIONS, STATUS, as_dict, as_tuple
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from meshsdk.datasets.batch import Batch


class ResumableLoader(Protocol):
    """The part of a `Loader` that a `PlainLoader` uses."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any] | str | bytes) -> None: ...


class PlainLoader:
    """Wraps a loader so that its batches are plain dictionaries, or whatever `convert` returns.

    Length and state are the loader's; it stays reachable as `loader`.
    """

    def __init__(self, loader: ResumableLoader, convert: Callable[[Batch], Any] = as_dict) -> None:
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


def tuple_loader(loader: ResumableLoader, known: Iterable[str], fields: Sequence[str]) -> PlainLoader:
    """Wrap a loader so that its batches are tuples of `fields`. These are among the `known` fields of the
    plan, the positions and the status. Raises ConfigurationError for any other field, or none."""
    names = (*known, POSITIONS, STATUS)
    unknown = [name for name in fields if name not in names]
    if unknown or not fields:
        wrong = f"no field {unknown[0]!r}" if unknown else "no fields given"
        raise ConfigurationError(
            f"as_tuples: {wrong}; a batch has {', '.join(names)}. Example: loader.as_tuples('image', 'label')"
        )
    return PlainLoader(loader, partial(as_tuple, names=fields))
