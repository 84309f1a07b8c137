"""RandomResizedCrop, flip and to-tensor on Pillow, as torchvision does them on a PIL image.

torchvision itself needs the same build of torch beside it, and there is none for the CPU-only wheel; its
functions on PIL images are the calls below. `resize(box=...)` saves the copy that crop-then-resize makes:
kinder to the peers.
"""

from __future__ import annotations

import io
import math
import random

import numpy as np
import torch
from PIL import Image

SIDE = 224
SCALE = (0.08, 1.0)
RATIO = (math.log(3 / 4), math.log(4 / 3))


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params: ten tries, then the largest centred crop in ratio."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(*RATIO))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = random.randint(0, width - w), random.randint(0, height - h)
            return x, y, x + w, y + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


def transform(jpeg: bytes) -> torch.Tensor:
    """uint8 [3, 224, 224] of a random crop, flipped half the time."""
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    crop = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=crop_box(*image.size))
    if random.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(crop)).permute(2, 0, 1)
