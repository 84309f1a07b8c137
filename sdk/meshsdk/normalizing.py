"""uint8 images to what a model takes, on the device where they are.

Law: computed in float32, rounded once. Images travel and cross the bus as uint8, half of the bytes or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Normalize:
    """(x / 255 - mean) / std of a field of uint8 images, [rows, channels, height, width] in torch's
    channels-last order of memory, whichever order they came in.

    Arguments:
        field: which one.
        mean, std: a value a channel, of images from 0 to 1; ImageNet's if left out.
        dtype: "bfloat16", "float16" or "float32".
    """

    field: str = "image"
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            raise ConfigurationError("Normalize: mean and std have a value a channel each, std above 0")
        if self.dtype not in _DTYPES:
            raise ConfigurationError(f"Normalize: dtype={self.dtype!r} is none of {', '.join(_DTYPES)}")

    def __call__(self, images: Any) -> Any:
        """The normalised tensor of a uint8 one, on its device and present stream. Raises ConfigurationError
        when it is no batch of images of so many channels."""
        return Normalizer(self)(images)


class Normalizer:
    """A `Normalize` at work. Its constants are brought to a device once: that waits for all that the stream
    was told before, so it is nothing to do with every batch. On one stream a device."""

    def __init__(self, how: Normalize) -> None:
        self.how = how
        self._constants: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, images: Any) -> Any:
        import torch

        images = self._checked(images)
        scale, shift = self._constants_on(images.device)
        values = images.to(torch.float32, memory_format=torch.channels_last)
        values.mul_(scale).add_(shift)
        return values.to(getattr(torch, self.how.dtype), memory_format=torch.channels_last)

    def _checked(self, images: Any) -> Any:
        """They, with channels before rows."""
        import torch

        field, count = self.how.field, len(self.how.mean)
        if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
            raise ConfigurationError(
                f"normalize: {field!r} must be uint8 images of one size, four dimensions a batch: "
                "resize or crop them, and leave ops.normalize out"
            )
        if images.shape[1] != count and images.shape[3] == count:
            images = images.permute(0, 3, 1, 2)
        if images.shape[1] != count:
            raise ConfigurationError(
                f"normalize: {field!r} is {list(images.shape)}, mean and std have {count} channels"
            )
        return images

    def _constants_on(self, device: Any) -> tuple[Any, Any]:
        import torch

        if device not in self._constants:
            mean, std = self.how.mean, self.how.std
            scale = [1 / (255 * each) for each in std]
            shift = [-each / by for each, by in zip(mean, std, strict=True)]
            shape = (1, len(mean), 1, 1)
            self._constants[device] = (
                torch.tensor(scale, device=device).view(shape),
                torch.tensor(shift, device=device).view(shape),
            )
        return self._constants[device]
