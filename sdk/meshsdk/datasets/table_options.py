"""Options of `mesh.open` for tables, and the ops that deliver their columns in their types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from meshsdk.errors import ConfigurationError
from meshwire.dataset.column_filter import parse_filter
from meshwire.plan.plan_spec import OpSpec
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.client.native_api import SnapshotInfo

Nulls = Literal["skip", "mask"]


def table_options(
    kind: str,
    filter: object,
    nulls: object,
    ids: object,
) -> dict[str, Any]:
    """Return the options of a table in the form of the protocol. Raises ConfigurationError."""
    if kind != "table":
        given = [name for name, value in (("filter", filter), ("ids", ids)) if value is not None]
        if given or nulls != "skip":
            name = given[0] if given else "nulls"
            raise ConfigurationError(f"{name}= is for kind='table'; samples of another kind: ds.filter(…)")
        return {}
    if nulls not in ("skip", "mask"):
        raise ConfigurationError(f"nulls={nulls!r}: use 'skip' (leave such rows out) or 'mask'")
    found: dict[str, Any] = {"masks": True} if nulls == "mask" else {}
    if ids is not None:
        if not isinstance(ids, (list, tuple)) or not all(isinstance(name, str) for name in ids):
            raise ConfigurationError(f"ids={ids!r:.80}: expected text columns, such as ids=['city']")
        found["ids"] = list(ids)
    if filter is not None:
        found["filter"] = _conditions(filter)
    return found


def _conditions(filter: object) -> list[list[Any]]:
    try:
        listed = [
            [list(part) if isinstance(part, (list, tuple, set, frozenset)) else part for part in condition]
            if isinstance(condition, (list, tuple))
            else condition
            for condition in filter  # type: ignore[attr-defined]  # TypeError below
        ]
        for condition in listed:
            if isinstance(condition, list) and len(condition) == 3 and isinstance(condition[2], list):
                condition[2].sort(key=lambda value: (str(type(value)), value))
        parse_filter(listed)
    except (PlanError, TypeError) as error:
        raise ConfigurationError(
            f"{error}; write filter=[('price', '>', 3), ('city', 'in', ['Rome', 'Oslo'])]: all must hold"
        ) from error
    return listed


def column_fields(
    fields: Mapping[str, Any] | None, columns: Sequence[str] | None, kind: str
) -> Mapping[str, Any] | None:
    """Return the fields, or those that `columns` names. Raises ConfigurationError."""
    if columns is None:
        return fields
    if kind not in ("table", "parquet") or fields is not None:
        raise ConfigurationError("columns= names columns of a table (kind='table'), in the place of fields=")
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns) or not columns:
        raise ConfigurationError(f"columns={columns!r:.80}: expected names, such as ['price', 'city']")
    return {_field_name(name): name for name in columns}


def _field_name(column: str) -> str:
    name = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in column)
    return name if name[:1].isalpha() else f"field_{name}"


def typed_ops(snapshot: SnapshotInfo) -> tuple[OpSpec, ...]:
    """Return the ops that deliver the columns of a table in their types; none for other fields."""
    return tuple(
        OpSpec("frombuffer", name, {"dtype": field.dtype, "shape": list(field.shape)})
        for name, field in sorted(snapshot.fields.items())
        if field.dtype
    )
