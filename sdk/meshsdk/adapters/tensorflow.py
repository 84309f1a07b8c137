"""A loader as a `tf.data.Dataset`.

Law: the element spec comes from one batch, without moving the loader; the loader prefetches, so `prefetch`
adds nothing. An iteration that is left before its end begins again with the next one: Keras takes a batch to
build a model, and starts over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.adapters.plain import plain_types
from meshsdk.loader.plain_loader import PlainLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.loader.loader import Loader


class RepeatableEpochs:
    """Each call yields (the rest of) an epoch of plain dictionaries, from where the last one began if that
    was left before its end and nobody has moved the loader since."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._left: tuple[dict[str, Any], int, int] | None = None  # state, epoch and moves of an iteration

    def __call__(self) -> Iterator[dict[str, Any]]:
        loader = self._loader
        if self._left is not None:
            state, *place = self._left
            if place == [loader.epoch, loader._moves]:
                loader.load_state_dict(state)
        state, epoch, self._left = loader.state_dict(), loader.epoch, None
        for batch in PlainLoader(loader):
            self._left = state, epoch, loader._moves
            yield batch


def as_tf_dataset(loader: Loader) -> Any:
    """Return a dataset in which each iteration is (the rest of) an epoch of plain dictionaries; one that was
    left before its end begins again. The loader's output must be "numpy"."""
    import tensorflow as tf

    signature = {
        name: tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype))
        for name, (dtype, shape) in plain_types(loader).items()
    }
    return tf.data.Dataset.from_generator(RepeatableEpochs(loader), output_signature=signature)
