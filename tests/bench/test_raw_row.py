"""The row of raw samples: contenders take turns, each peer has a writer and a loader, batches are checked."""

from __future__ import annotations

import os
import tarfile
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bench import raw_reader, raw_row
from bench.peers.raw_loaders import LOADERS, WRITERS
from bench.peers.raw_rows import BATCH, OURS, PEERS, SHARDS, WIDTH, samples
from bench.results import Figure, RowResult
from meshsdk.datasets.batch import Batch, Ragged
from tests.bench.test_turns import SCALE, balanced, names_in_turn, quiet, server

if TYPE_CHECKING:
    from pathlib import Path

LINES = 200


def test_contenders_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def standing(name: str, *_: object) -> Any:
        return nullcontext(
            SimpleNamespace(wait_ready=lambda: None, figure=lambda number: Figure(name, number, {}))
        )

    monkeypatch.setattr(raw_row, "_contender", standing)
    monkeypatch.setattr(raw_row, "_fill", lambda *_: None)
    figures = raw_row.measure(server("meshd"), PEERS, SCALE, tmp_path, quiet)
    assert names_in_turn(figures) == balanced([OURS, *PEERS])


def test_every_peer_has_a_writer_and_a_loader() -> None:
    assert set(LOADERS) == set(WRITERS) == set(PEERS)


def test_writers_write_each_sample_once(tmp_path: Path) -> None:
    wanted = sorted(sample for shard in range(SHARDS) for sample in samples(shard, LINES))
    assert len(set(wanted)) == LINES
    for name in ("webdataset", "datasets"):
        (tmp_path / name).mkdir()
        WRITERS[name](tmp_path / name, LINES)
    lines = [line for path in (tmp_path / "datasets").iterdir() for line in path.read_bytes().splitlines()]
    assert sorted(lines) == wanted
    members = list[bytes]()
    for path in (tmp_path / "webdataset").iterdir():
        with tarfile.open(path) as file:
            members += [found.read() for member in file if (found := file.extractfile(member)) is not None]
    assert sorted(members) == wanted


def test_batches_are_looked_at() -> None:
    rows = [b"7" * WIDTH] * BATCH
    assert raw_reader.look(rows) == BATCH
    assert raw_reader.look([rows]) == BATCH  # as WebDataset has them
    assert raw_reader.look([{"text": rows[0].decode()}] * BATCH) == BATCH
    data = torch.frombuffer(bytearray(b"7" * WIDTH * BATCH), dtype=torch.uint8)
    text, zeros = Ragged(data, torch.arange(BATCH + 1) * WIDTH, None), torch.zeros(BATCH)
    assert raw_reader.look(Batch({"text": text}, zeros, zeros, 0, 0)) == BATCH
    with pytest.raises(SystemExit, match="no batch"):
        raw_reader.look([b"x" * WIDTH] * BATCH)
    with pytest.raises(SystemExit, match="no batch"):
        raw_reader.look(rows[1:])


def test_the_cpu_time_of_a_process_and_its_children() -> None:
    assert raw_reader.server_cpu(os.getpid()) > 0.0


def test_bars_are_told() -> None:
    figures = [
        Figure(name, 0, {"rate": rate, "client_us": 1.0, "server_us": 2.0})
        for name, rate in ((OURS, 600_000.0), ("datasets", 200_000.0), ("litdata", 200_000.0))
    ]
    lines = "\n".join(raw_row.section({raw_row.NAME: result(figures)})).splitlines()
    [target] = [line for line in lines if line.startswith("| meshsdk ÷ datasets |")]
    assert "≥ 5 **missed**" in target
    [beside] = [line for line in lines if line.startswith("| meshsdk ÷ litdata |")]  # not in the target
    assert "3.0×" in beside
    assert "5" not in beside
    assert raw_row.section({}) == []


def result(figures: list[Figure]) -> RowResult:
    return RowResult(raw_row.NAME, raw_row.title(SCALE), "", "", {}, tuple(figures), {})
