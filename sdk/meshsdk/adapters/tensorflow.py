"""A loader as a `tf.data.Dataset`.

Law: the element spec comes from one batch, without moving the loader; the loader prefetches, so `prefetch`
adds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.adapters.plain import plain_types
from meshsdk.loader.plain_loader import PlainLoader

if TYPE_CHECKING:
    from meshsdk.loader.loader import Loader


def as_tf_dataset(loader: Loader) -> Any:
    """Return a dataset in which each iteration is (the rest of) an epoch of plain dictionaries. The
    loader's output must be "numpy"."""
    import tensorflow as tf

    signature = {
        name: tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype))
        for name, (dtype, shape) in plain_types(loader).items()
    }
    return tf.data.Dataset.from_generator(lambda: iter(PlainLoader(loader)), output_signature=signature)
