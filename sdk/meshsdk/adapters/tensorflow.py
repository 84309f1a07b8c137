"""A loader as a `tf.data.Dataset`.

Law: the element spec is derived from one batch, without moving the loader. The loader prefetches, so
`prefetch` adds nothing. If an iteration is abandoned before its end, the next one starts where it began:
Keras takes a batch to build a model, and then starts over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.adapters.plain import plain_types
from meshsdk.loader.plain_loader import PlainLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.loader.loader import Loader


class RepeatableEpochs:
    """Each call yields (the rest of) an epoch as plain dictionaries. If the previous call's iteration was
    abandoned before its end, and the loader was not moved since, it starts where that one began."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._abandoned: tuple[dict[str, Any], int, int] | None = None  # state, epoch and moves

    def __call__(self) -> Iterator[dict[str, Any]]:
        loader = self._loader
        if self._abandoned is not None:
            state, *place = self._abandoned
            if place == [loader.epoch, loader._moves]:
                loader.load_state_dict(state)
        state, epoch, self._abandoned = loader.state_dict(), loader.epoch, None
        for batch in PlainLoader(loader):
            self._abandoned = state, epoch, loader._moves
            yield batch


def as_tf_dataset(loader: Loader) -> Any:
    """Return a dataset whose iterations are each (the rest of) an epoch, as plain dictionaries. After an
    iteration that was abandoned before its end, the next one starts where it began. The loader's output must
    be "numpy".
    """
    import tensorflow as tf

    signature = {
        name: tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype))
        for name, (dtype, shape) in plain_types(loader).items()
    }
    return tf.data.Dataset.from_generator(RepeatableEpochs(loader), output_signature=signature)
