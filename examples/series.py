"""Forecasts of time series kept as a Zarr array: a row is a series, its end is learnt from its beginning.

    python -m examples.series s3://sensors/v1 --array waves

Law: rows are cut out of the array by the storage nodes; no chunk is unpacked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import meshsdk as mesh
from examples.arguments import command_line, positive, run
from examples.figures import SeenRows, report
from meshsdk import ops

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def series(url: str, array: str) -> mesh.Dataset:
    """One field, `series`: a row of a Zarr v3 array [series, time], whose chunks are of one row."""
    rows = mesh.open(url, fields={"series": array}, kind="zarr")
    metadata = "/".join(part for part in (url.rstrip("/"), array, "zarr.json") if part)
    return rows.map(ops.zarr("series", metadata))


class Forecast(nn.Module):
    """[rows, known] → [rows, ahead]: a straight line through what is known, and a small network beside it."""

    def __init__(self, known: int, ahead: int, width: int = 64) -> None:
        super().__init__()
        self.straight = nn.Linear(known, ahead)
        self.bent = nn.Sequential(nn.Linear(known, width), nn.GELU(), nn.Linear(width, ahead))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.straight(x) + self.bent(x)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("examples.series", __doc__)
    parser.add_argument("source", help="where the array, or the group it is in, lies, as s3://sensors/v1")
    parser.add_argument("--array", help="its name in the group, where it is in one")
    parser.add_argument("--ahead", type=positive, default=8, help="time steps to forecast: the last ones")
    parser.add_argument("--batch", type=positive, default=32, help="rows of a step over all ranks")
    parser.add_argument("--epochs", type=positive, default=10, help="passes over the array")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The mean squared error of each epoch."""
    options = parse(arguments)
    torch.manual_seed(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = series(options.source, options.array or "")
    (time,) = dataset.schema()["series"].shape or (0,)
    if time <= options.ahead:
        raise SystemExit(
            f"--ahead {options.ahead}: these series have {time} time steps, the last of them to forecast"
        )
    model = Forecast(time - options.ahead, options.ahead).to(device)
    optimizer = torch.optim.Adam(model.parameters(), options.rate)
    seen, errors = SeenRows(), []
    with mesh.Loader(dataset, options.batch, seed=7, shuffle=mesh.Blocks(shards=8)) as loader:
        for _ in range(options.epochs):
            total = 0.0
            for batch in loader:
                rows = batch["series"].to(device)
                known, ahead = rows[:, : -options.ahead], rows[:, -options.ahead :]
                loss = nn.functional.mse_loss(model(known), ahead)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.add(batch)
                total += loss.item()
            errors.append(total / len(loader))
        report(loader, seen.total, error=f"{errors[-1]:.4f}", epochs=options.epochs)
    return errors


if __name__ == "__main__":
    run(main)
