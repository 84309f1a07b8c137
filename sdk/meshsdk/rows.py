"""Samples one by one: the rows behind `ds[i]`.

Law: in the order asked for, whole requests; values are copies of nothing, views of the frame they came in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshsdk.batches import Ragged, split_frame
from meshsdk.frames import read_frame
from meshsdk.native import rows_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.transport import Transport

_ROWS_A_REQUEST = 512


def fetch_rows(transport: Transport, plan: str, epoch: int, samples: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a plan, by number of sample: numpy arrays and scalars by field."""
    rows: list[dict[str, Any]] = []
    for start in range(0, len(samples), _ROWS_A_REQUEST):
        rows += _fetched(transport, plan, epoch, samples[start : start + _ROWS_A_REQUEST])
    return rows


def _fetched(transport: Transport, plan: str, epoch: int, samples: Sequence[int]) -> list[dict[str, Any]]:
    frame = transport.call(rows_request(plan, epoch, samples), read_frame)
    fields, _, _ = split_frame(frame.arrays, lambda array: array)
    return [{name: _row(value, row) for name, value in fields.items()} for row in range(len(samples))]


def _row(value: Any, row: int) -> Any:
    if isinstance(value, Ragged):
        return value[row]
    picked = value[row]
    return picked if isinstance(picked, np.ndarray) else picked[()]
