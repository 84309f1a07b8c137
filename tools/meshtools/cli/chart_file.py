"""The argument of `--plot`: a file for a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class ChartFile(click.ParamType[Path]):
    """A path that ends in `.svg`, the form of all charts."""

    name = "file.svg"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.suffix.lower() != ".svg":
            name = f"{path.stem.strip('.') or 'chart'}.svg"
            self.fail(f"charts are SVG, which browsers show: {name}", param, ctx)
        if path.is_dir():
            self.fail(f"{str(path)!r} is a directory", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no directory {str(path.parent)!r}", param, ctx)
        return path
