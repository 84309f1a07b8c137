"""Images, fuzzed: what decodes them, and the way that decodes less for what comes behind.

Law: see `targets`. Whatever bytes: a whole image of the promised type, or a bad sample; and where the plain
chain makes something, so does the fused one.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.transform.builtin.image_codecs import (
    MAX_PIXELS,
    decode,
    decode_jpeg,
    decode_jpeg_rows,
    read_jpeg_head,
)
from meshd.transform.builtin.stored_values import decode_indices, decode_unchanged
from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshwire.formats.image_headers import read_image_header
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from meshd.transform.op_chain import OpChain

_OPS = [(0, OpSpec("decode", "image")), (1, OpSpec("random_resized_crop", "image", {"size": 4}))]
_FUSED, _PLAIN = compile_chain(_OPS), compile_chain(_OPS, fuse=False)


def image(data: bytes) -> None:
    """`decode`, alone and fused."""
    with contextlib.suppress(BadSampleError):
        found = decode(data, "rgb")
        assert found.dtype == np.uint8
        assert found.ndim == 3
        assert found.shape[2] == 3
        assert 0 < found.shape[0] * found.shape[1] <= MAX_PIXELS
    _stored(data)
    fused, plain = _outcome(_FUSED, data), _outcome(_PLAIN, data)
    assert fused is not None or plain is None, "bad for want of what it does not even look at"
    for found in (fused, plain):
        assert found is None or found.shape == (4, 4, 3)
    _upper_rows(data)


def _stored(data: bytes) -> None:
    """The values as stored are what the header says, or the file is a bad sample."""
    header = read_image_header(data)
    with contextlib.suppress(BadSampleError):
        assert decode_indices(data).dtype == np.uint8
    if header is None:
        return
    with contextlib.suppress(BadSampleError):
        found = decode_unchanged(data, header.dtype, header.channels)
        assert found.shape == (header.height, header.width, header.channels)
        assert found.dtype == header.dtype
        assert 0 < header.height * header.width <= MAX_PIXELS


def _upper_rows(data: bytes) -> None:
    """Where the whole can be decoded, its upper rows are what decoding these alone gives."""
    try:
        head = read_jpeg_head(data)
        whole = decode_jpeg(data, head, "rgb")
    except BadSampleError:
        return
    rows = 1 + len(data) % head.height
    assert np.array_equal(decode_jpeg_rows(data, head, "rgb", rows)[:rows], whole[:rows])


def _outcome(chain: OpChain, data: bytes) -> Any:
    try:
        return chain.render(data, partial(KeyedRandom, 7, 0, 3))
    except BadSampleError:
        return None
