"""The console's types of the native API's replies; run as a program it writes them.

make reference
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec

from meshd.server.api import reply_types

PAGE = Path(__file__).resolve().parents[2] / "console" / "src" / "schema.ts"
_HEAD = """// Generated from meshd/server/api/reply_types.py by `make reference`: do not edit.

"""
_SIMPLE = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def page() -> str:
    """What should be there."""
    every = [
        kind
        for _, kind in sorted(inspect.getmembers(reply_types, inspect.isclass))
        if issubclass(kind, reply_types.Reply) and kind is not reply_types.Reply
    ]
    _, components = msgspec.json.schema_components(every, ref_template="{name}")
    return _HEAD + "\n".join(_interface(name, shape) for name, shape in sorted(components.items()))


def _interface(name: str, shape: dict[str, Any]) -> str:
    required = set(shape.get("required", ()))
    lines = [f"/** {' '.join(str(shape.get('description', '')).split())} */", f"export interface {name} {{"]
    for member, kind in shape["properties"].items():
        lines.append(f"  {member}{'' if member in required else '?'}: {_type(kind)};")
    return "\n".join([*lines, "}", ""])


def _type(shape: dict[str, Any]) -> str:
    if "$ref" in shape:
        return str(shape["$ref"])
    if "anyOf" in shape:
        return " | ".join(map(_type, shape["anyOf"]))
    if "enum" in shape:
        return " | ".join(json.dumps(value) for value in shape["enum"])
    kind = shape.get("type")
    if kind == "array":
        if "prefixItems" in shape:
            return f"[{', '.join(map(_type, shape['prefixItems']))}]"
        found = _type(shape.get("items", {}))
        return f"({found})[]" if "|" in found else f"{found}[]"
    if kind == "object":
        more = shape.get("additionalProperties", {})
        return f"Record<string, {_type(more) if isinstance(more, dict) else 'unknown'}>"
    return _SIMPLE.get(str(kind), "unknown")


if __name__ == "__main__":
    PAGE.write_text(page())
