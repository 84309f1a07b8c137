"""Views of kind `batches`: the epochs of a plan as a bucket of `.safetensors` files.

Law: a key is the address of a frame of the plan, in one spelling. The document names the plan by its hash,
so the content of a key never changes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwire.plan.rank_slices import MAX_BATCH, MAX_WORLD
from meshwire.strict_json import canonical_json, checked_hash, checked_integer, checked_object, required_field
from meshwire.views.numbered_keys import KeyLevel, NumberedKeys
from meshwire.views.view_fields import checked_also, checked_source

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_EPOCHS = 1 << 20
_STEP_DIGITS = 6


@dataclass(frozen=True)
class BatchesView:
    """The first `epochs` epochs of the plan with this hash, in global batches of `batch` rows divided among
    `world` ranks. `also`: further buckets that contain its samples."""

    source: str
    plan: str
    batch: int
    world: int = 1
    epochs: int = 1
    also: tuple[str, ...] = ()
    kind: Literal["batches"] = "batches"

    def to_json(self) -> bytes:
        """Encode the canonical document."""
        return canonical_json(dataclasses.asdict(self) | {"also": list(self.also)})

    def keys(self, steps: int) -> NumberedKeys:
        """Return the view's keys, given the steps of an epoch of the plan: (epoch, step, rank) each. Steps
        have at least six digits, and as many as the last one needs."""
        width = max(_STEP_DIGITS, len(str(max(0, steps - 1))))
        levels = (
            KeyLevel("epoch=", self.epochs),
            KeyLevel("/step=", steps, width),
            KeyLevel("/rank=", self.world),
        )
        return NumberedKeys(levels, f"-of-{self.world}.safetensors")


def parse_batches(value: Mapping[str, Any], bucket: str) -> BatchesView:
    """Parse a document. Raises PlanError with the path of the bad field."""
    document = checked_object(dict(value), "", ("kind", "source", "also", "plan", "batch", "world", "epochs"))
    return BatchesView(
        checked_source(document, bucket),
        checked_hash(required_field(document, "plan", ""), "plan"),
        checked_integer(required_field(document, "batch", ""), "batch", 1, MAX_BATCH),
        checked_integer(document.get("world", 1), "world", 1, MAX_WORLD),
        checked_integer(document.get("epochs", 1), "epochs", 1, MAX_EPOCHS),
        checked_also(document),
    )
