"""The body of a request that registers a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshd.datasets.service import invalid_plan
from meshwire.plan.plan_spec import parse_spec
from meshwire.strict_json import (
    PlanError,
    checked_hash,
    checked_integer,
    checked_object,
    read_json,
    required_field,
)

if TYPE_CHECKING:
    from meshwire.plan.plan_spec import PlanSpec


@dataclass(frozen=True, slots=True)
class Registration:
    """A parsed plan request. `batch` is None if the request does not give a batch size."""

    snapshot: str
    spec: PlanSpec
    batch: int | None


def parse_registration(body: bytes) -> Registration:
    """Parses the body of a plan request. Raises BatchError InvalidPlan."""
    try:
        document = checked_object(read_json(body), "", ("snapshot", "spec", "batch"))
        spec = _checked_spec(required_field(document, "spec", ""))
        batch = document.get("batch")
        return Registration(
            checked_hash(required_field(document, "snapshot", ""), "snapshot"),
            parse_spec(spec),
            None if batch is None else checked_integer(batch, "batch", 1, 1 << 24),
        )
    except PlanError as error:
        raise invalid_plan(error) from error


def _checked_spec(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError("spec", "expected an object")
    return value
