"""Names beside samples: files that are often in a folder of samples, but are no fields of them.

Law: decides by names alone, before fields are inferred from the rest.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from meshwire.dataset.fields import sample_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

IMAGES = ("jpg", "jpeg", "png", "webp")
_ASIDE = ("README", "LICENSE", "Thumbs", "desktop", "")  # of names such as Thumbs.db and .DS_Store
_RARE = 10  # an extension that is never beside an image is no field if images are as many times as frequent


def names_of_samples(names: Iterable[str]) -> list[str]:
    """Return the names without those of files that are often next to samples; all, if these are all."""
    listed = list(names)
    return [name for name in listed if name.rpartition("/")[2].partition(".")[0] not in _ASIDE] or listed


def without_rare(names: Sequence[str]) -> list[str]:
    """Return the names without those of rare extensions that no image has beside it."""
    keys = [sample_key(name) for name in names]
    images = [stem for stem, ext in keys if ext in IMAGES]
    count = Counter(ext for _, ext in keys)
    with_image = set(images)
    beside = {ext for stem, ext in keys if stem in with_image}
    rare = {ext for ext in count if ext not in beside and count[ext] * _RARE <= len(images)}
    return [name for name, (_, ext) in zip(names, keys, strict=True) if ext not in rare]
