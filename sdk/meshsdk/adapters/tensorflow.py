"""A loader as a `tf.data.Dataset`.

Law: what the elements are is told by a look at one batch, which moves nothing; the loader reads ahead, so
`prefetch` adds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.adapters.plain import PlainLoader, plain_types

if TYPE_CHECKING:
    from meshsdk.loaders import Loader


def as_tf_dataset(loader: Loader) -> Any:
    """Each iteration is (the rest of) an epoch of plain dictionaries. The loader's output is "numpy"."""
    import tensorflow as tf

    signature = {
        name: tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype))
        for name, (dtype, shape) in plain_types(loader).items()
    }
    return tf.data.Dataset.from_generator(lambda: iter(PlainLoader(loader)), output_signature=signature)
