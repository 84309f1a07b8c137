"""A loader for torchdata: in a StatefulDataLoader, and as a node.

Law: the state is the loader's own, so a torchdata checkpoint resumes at any world size. Batches come ready:
no workers, no collation, no pinning thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.nodes import BaseNode

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshsdk.datasets.batch import Batch
    from meshsdk.loader.loader import Loader


def as_it_is(batch: Batch) -> Batch:
    """The `collate_fn` for complete batches: torch's own would convert a batch to a plain dict, without
    positions and status."""
    return batch


class LoaderDataset(IterableDataset):
    """A dataset for `StatefulDataLoader(LoaderDataset(loader), batch_size=None, collate_fn=as_it_is)`: each
    pass is (the rest of) an epoch."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise ConfigurationError(
                "the loader reads on its own; set num_workers=0 (every worker would read every batch)"
            )
        return iter(self.loader)

    def __len__(self) -> int:
        return self.loader._under_way

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)


class LoaderNode(BaseNode):
    """The first node of a graph: yields the batches of (the rest of) an epoch, and after a `reset` those of
    the next one."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.loader = loader
        self._batches: Iterator[Batch] = iter(())

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if initial_state is not None:
            self.loader.load_state_dict(initial_state)
        self._batches = iter(self.loader)

    def next(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return self.loader.state_dict()
