"""Rounds of torch's own DataLoader over a dataset, as readers of benchmark rows take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


def shuffled_rounds(dataset: Any, batch: int, workers: int) -> Generator[Iterator[torch.Tensor], None, None]:
    """Yield endless iterators over shuffled batches; the workers stay."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    while True:
        yield (each for _ in iter(int, 1) for each in loader)
