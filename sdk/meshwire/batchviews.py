"""Views of kind `batches`: a plan's epochs as a bucket of `.safetensors` files.

Law: a key is an address of the plan's frames, spelled in one way; the document names the plan by its hash, so
that what is under a key never changes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwire.documents import canonical_json, checked_integer, checked_object, required
from meshwire.loaderstate import checked_hash
from meshwire.numbered import Level, Numbered
from meshwire.slices import MAX_BATCH, MAX_WORLD
from meshwire.viewfields import checked_also, checked_source

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_EPOCHS = 1 << 20
_STEP_DIGITS = 6


@dataclass(frozen=True)
class BatchesView:
    """The first `epochs` epochs of the plan with this hash, in global batches of `batch` rows cut for `world`
    ranks. `also`: further buckets that its samples lie in."""

    source: str
    plan: str
    batch: int
    world: int = 1
    epochs: int = 1
    also: tuple[str, ...] = ()
    kind: Literal["batches"] = "batches"

    def to_json(self) -> bytes:
        """The canonical document."""
        return canonical_json(dataclasses.asdict(self) | {"also": list(self.also)})

    def keys(self, steps: int) -> Numbered:
        """The view's keys, given the steps an epoch of the plan has: (epoch, step, rank) each. Steps have at
        least six digits, and as many as the last one needs."""
        width = max(_STEP_DIGITS, len(str(max(0, steps - 1))))
        levels = (
            Level("epoch=", self.epochs),
            Level("/step=", steps, width),
            Level("/rank=", self.world),
        )
        return Numbered(levels, f"-of-{self.world}.safetensors")


def parse_batches(value: Mapping[str, Any], bucket: str) -> BatchesView:
    """Raises PlanError with the path of the bad field."""
    document = checked_object(dict(value), "", ("kind", "source", "also", "plan", "batch", "world", "epochs"))
    return BatchesView(
        checked_source(document, bucket),
        checked_hash(required(document, "plan", ""), "plan"),
        checked_integer(required(document, "batch", ""), "batch", 1, MAX_BATCH),
        checked_integer(document.get("world", 1), "world", 1, MAX_WORLD),
        checked_integer(document.get("epochs", 1), "epochs", 1, MAX_EPOCHS),
        checked_also(document),
    )
