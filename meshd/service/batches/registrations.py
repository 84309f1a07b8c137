"""The body of `POST /-/plans`, parsed.

Law: whatever is wrong is a BatchError InvalidPlan with the path of the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshd.service.datasets.service import invalid
from meshwire.documents import PlanError, checked_integer, checked_object, read_json, required
from meshwire.loaderstate import checked_hash
from meshwire.plans import parse_spec

if TYPE_CHECKING:
    from meshwire.plans import PlanSpec


@dataclass(frozen=True, slots=True)
class Registration:
    """A plan request, parsed. `batch` None: the caller did not say."""

    snapshot: str
    spec: PlanSpec
    batch: int | None


def parse_registration(body: bytes) -> Registration:
    """Raises BatchError InvalidPlan."""
    try:
        document = checked_object(read_json(body), "", ("snapshot", "spec", "batch"))
        spec = _checked_spec(required(document, "spec", ""))
        batch = document.get("batch")
        return Registration(
            checked_hash(required(document, "snapshot", ""), "snapshot"),
            parse_spec(spec),
            None if batch is None else checked_integer(batch, "batch", 1, 1 << 24),
        )
    except PlanError as error:
        raise invalid(error) from error


def _checked_spec(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError("spec", "expected an object")
    return value
