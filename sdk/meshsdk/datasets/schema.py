"""The schema of a dataset: an immutable mapping of field names, shown as a table.

Law: it equals any mapping with the same items, and shows only what nodes report of the plan and the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.native_api import FieldInfo, FieldSchema
    from meshwire.plan.plan_spec import OpSpec

_HEADER = ("field", "kind", "dtype", "shape", "")


class Schema(Mapping[str, "FieldSchema"]):
    """The fields of a row by name (FieldSchema); `print(schema)` shows a table.

    Attributes:
        kinds: what a field is, by name: "image", "sound", "label", "bytes", "number" or "array".
        notes: what the plan does that its author may not mean, such as a conversion that loses something.
    """

    __slots__ = ("_classes", "_fields", "kinds", "notes")

    def __init__(
        self,
        fields: Mapping[str, FieldSchema],
        stored: Mapping[str, FieldInfo],
        ops: tuple[OpSpec, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self._fields = dict(fields)
        changed = {name for op in ops for name in op.all_fields}
        untouched = {name: field for name, field in stored.items() if name not in changed}
        self.kinds: Mapping[str, str] = {
            name: _kind(field, untouched.get(name)) for name, field in fields.items()
        }
        self._classes = {name: len(field.classes) for name, field in untouched.items() if field.classes}
        self.notes = notes

    def __getitem__(self, name: str) -> FieldSchema:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        rows = [_HEADER, *(self._row(name, field) for name, field in self._fields.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _row(self, name: str, field: FieldSchema) -> tuple[str, ...]:
        classes = self._classes.get(name)
        remarks = f"{classes} classes" if classes else field.remarks
        return name, self.kinds[name], field.dtype, field.extents, remarks


def _kind(field: FieldSchema, stored: FieldInfo | None) -> str:
    if field.decoded:
        return "image"
    if field.rate:
        return "sound"
    if stored is not None and stored.kind == "label":
        return "label"
    if stored is not None and not stored.dtype and field.shape is None:
        return "bytes"
    return "number" if field.shape == () else "array"
