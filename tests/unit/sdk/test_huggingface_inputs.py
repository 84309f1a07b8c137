"""What the Trainer's loader says about a field that `inputs` does not find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshsdk.adapters.huggingface import InputLoader
from meshsdk.datasets.batch import Frame, make_batch
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.datasets.batch import Batch


class OneBatch:
    """A loader of one batch, whose images differ in size."""

    def __iter__(self) -> Iterator[Batch]:
        ragged = {"image.data": np.arange(5), "image.offsets": np.array([0, 2, 5])}
        rows = {"label": np.arange(2), "__pos": np.arange(2)}
        arrays: dict[str, Any] = {**ragged, **rows, "__status": np.zeros(2, np.uint8)}
        yield make_batch(Frame(0, arrays, 100), 0, lambda array: array)


def test_a_field_whose_rows_differ_in_shape_is_named() -> None:
    loader: Any = OneBatch()
    with pytest.raises(ConfigurationError, match=r"rows of 'image' may differ.*ops\.resize.*'image\.data'"):
        next(iter(InputLoader(loader, lambda batch: {"pixel_values": batch["image"]})))
    with pytest.raises(KeyError, match="picture"):
        next(iter(InputLoader(loader, lambda batch: {"pixel_values": batch["picture"]})))
    found = next(iter(InputLoader(loader, lambda batch: {"pixels": batch["image.data"]})))
    assert found["pixels"].tolist() == [0, 1, 2, 3, 4]
