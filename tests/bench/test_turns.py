"""Contenders take turns in rounds that balance each other, in every row that has any."""

from __future__ import annotations

import itertools
import os
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bench
from bench import checkpoints, loader_timing, shared_jobs, store_timing, table_row, tokens, windows
from bench.interleave import order, turns
from bench.load_generator import Load, Reading
from bench.loader_timing import Turn
from bench.peers.token_loaders import LOADERS, WRITERS
from bench.peers.token_rows import BATCH, FILLING, LENGTH, PEERS, VALUES
from bench.presigned_requests import Account
from bench.processes import ChildError
from bench.results import Figure
from bench.rows import QUICK, Scale, store_rows
from bench.subprocess_row import apart
from bench.token_reader import look
from tests.bench.counted_figures import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bench.servers import Server

ROUNDS = 4
SCALE = Scale(**{**{name: getattr(QUICK, name) for name in Scale.__slots__}, "rounds": ROUNDS})


def names_in_turn(figures: Iterable[Figure]) -> list[list[str]]:
    """The contenders of each round, in the order their figures came."""
    found = list(figures)
    return [[each.contender for each in found if each.round == number] for number in range(ROUNDS)]


def balanced(names: list[str]) -> list[list[str]]:
    return [names, names[::-1], names, names[::-1]]


def server(name: str) -> Server:
    child = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
    return SimpleNamespace(  # type: ignore[return-value]
        name=name, endpoint="http://127.0.0.1:1", host="", account=Account("a", "b"), child=child
    )


def quiet(_: str) -> None:
    """Progress that nobody reads."""


@given(st.integers(2, 6), st.integers(1, 4))
def test_in_an_even_number_of_rounds_each_follows_each_neighbour_as_often(count: int, pairs: int) -> None:
    names = [f"c{number}" for number in range(count)]
    taken: list[tuple[int, str]] = list(turns("row", names, 2 * pairs, quiet))
    assert [number for number, _ in taken] == [number for number in range(2 * pairs) for _ in names]
    within = [[name for at, name in taken if at == number] for number in range(2 * pairs)]
    follows = [pair for one in within for pair in itertools.pairwise(one)]
    for left, right in itertools.pairwise(names):
        assert follows.count((left, right)) == follows.count((right, left)) == pairs


def test_a_line_is_said_before_each_turn() -> None:
    said: list[str] = []
    for number, name in turns("get-10k", ["a", "b"], 2, said.append):
        assert said[-1] == f"get-10k: {name}, round {number + 1} of 2"
    assert len(said) == 4


def _loaders(rounds: int) -> Iterator[Figure]:
    jobs = [Turn(name, server("meshd")) for name in ("one", "two", "three")]
    return loader_timing.measure(jobs, rounds, QUICK, Path(), quiet)


def _jobs(rounds: int) -> Iterator[Figure]:
    jobs = [Turn(name, server("meshd")) for name in ("one", "two", "three")]
    return shared_jobs.measure(jobs, rounds, QUICK, Path(), quiet)


@pytest.mark.parametrize(("module", "measure"), [(loader_timing, _loaders), (shared_jobs, _jobs)])
def test_loaders_take_turns(
    module: Any, measure: Callable[[int], Iterator[Figure]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(turn: Turn, _: Scale, __: Path, number: int) -> Figure:
        return Figure(turn.name, number, {"rate": 1.0})

    monkeypatch.setattr(module, "read_repeatedly" if module is loader_timing else "together", taken)
    names = [f"{name} from meshd" for name in ("one", "two", "three")]
    assert names_in_turn(measure(ROUNDS)) == balanced(names)


def test_a_loader_that_fails_is_given_up_in_whatever_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(turn: Turn, _: Scale, __: Path, number: int) -> Figure:
        return Figure(turn.name, number, {}, "no" if turn.loader == "two" and number == 1 else "")

    monkeypatch.setattr(loader_timing, "read_repeatedly", taken)
    rounds = [[name.split()[0] for name in each] for each in names_in_turn(_loaders(ROUNDS))]
    assert rounds == [["one", "two", "three"], ["three", "two", "one"], ["one", "three"], ["three", "one"]]


def test_servers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = store_rows(SCALE)[0]
    monkeypatch.setattr(store_timing, "prepare", lambda *_: None)
    monkeypatch.setattr(store_timing, "run", lambda *_: Reading(1, 1.0, row.size, 0, 1.0, 1.0, 1.0))
    running = {name: server(name) for name in row.servers}
    assert names_in_turn(store_timing.measure(row, running, SCALE, tmp_path, quiet)) == balanced(
        list(row.servers)
    )


def test_a_reading_has_the_cpu_time_of_the_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = store_rows(SCALE)[0]
    spent = iter([1.0, 1.5])
    monkeypatch.setattr(store_timing, "cpu_seconds", lambda pid: next(spent) if pid == os.getpid() else 0.0)
    monkeypatch.setattr(store_timing, "run", lambda *_: Reading(1000, 1.0, 1000 * row.size, 0, 1.0, 1.0, 1.0))
    figure = store_timing.take(row, server("meshd"), Load((), 1, 1), tmp_path, 0)
    assert figure.metrics["cpu_us"] == 500.0


def test_loaders_of_tokens_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def standing(name: str, *_: object) -> Any:
        return nullcontext(
            SimpleNamespace(wait_ready=lambda: None, figure=lambda number: Figure(name, number, {}))
        )

    monkeypatch.setattr(tokens, "_contender", standing)
    monkeypatch.setattr(tokens, "_fill", lambda *_: None)
    figures = tokens.measure(server("meshd"), tuple(tokens.FORMATS), SCALE, tmp_path, quiet)
    assert names_in_turn(figures) == balanced(list(tokens.CONTENDERS))


def test_every_peer_of_tokens_has_a_loader() -> None:
    assert tuple(LOADERS) == PEERS
    assert set(WRITERS) == set(tokens.FORMATS)


def test_rows_of_tokens_are_looked_at(tmp_path: Path) -> None:
    stream = np.arange(80 * LENGTH) % VALUES
    (tmp_path / "stream.bin").write_bytes(stream.astype(np.uint16).tobytes())
    rows = [row for batch in LOADERS["memmap"]("", str(tmp_path)) for row in batch.tolist()]
    assert len(rows) == 2 * BATCH
    batch = torch.tensor(rows[:BATCH])
    assert look(batch) == BATCH * LENGTH
    segments = torch.ones_like(batch)
    segments[:, -3:] = 0
    assert look((batch, segments)) == BATCH * (LENGTH - 3)
    texts = batch.clone()
    texts[:, 9:] += 30  # two texts, and the filling of a row
    texts[:, -3:] = FILLING
    assert look((texts, None)) == BATCH * (LENGTH - 3)
    with pytest.raises(SystemExit, match="upwards"):
        look((texts[:, torch.randperm(LENGTH)], None))
    batch[0, 7] = 0
    with pytest.raises(SystemExit, match="upwards"):
        look(batch)


def test_a_mapped_file_gives_the_segments_that_ours_give(tmp_path: Path) -> None:
    lengths = np.array([LENGTH, 3, LENGTH - 4, LENGTH + 5, *[LENGTH] * BATCH])
    stream = np.arange(lengths.sum()) % VALUES
    (tmp_path / "stream.bin").write_bytes(stream.astype(np.uint16).tobytes())
    (tmp_path / "ends.bin").write_bytes(lengths.cumsum().astype(np.int64).tobytes())
    segments = np.repeat(np.arange(lengths.size), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    [batch] = LOADERS["memmap+segments"]("", str(tmp_path))
    assert look(batch) == BATCH * LENGTH
    for row, numbered, placed in zip(*(each.numpy() for each in batch), strict=True):
        [begin] = [at for at in np.flatnonzero(stream == row[0]).tolist() if at % LENGTH == 0]
        inside = segments[begin : begin + LENGTH]
        assert numbered.tolist() == (inside - inside[0] + 1).tolist()
        known = positions[begin : begin + LENGTH] - np.where(inside == inside[0], positions[begin], 0)
        assert placed.tolist() == known.tolist()  # of a text that began before the window, from its cut


@pytest.mark.parametrize("module", [windows, table_row, checkpoints])
def test_standing_contenders_take_turns(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def standing(name: str, *_: object) -> Any:
        made = SimpleNamespace(wait_ready=lambda: None, figure=lambda number: Figure(name, number, {}))
        return nullcontext(made)

    monkeypatch.setattr(module, "_contender", standing)
    monkeypatch.setattr(module, "connect", lambda *_, **__: nullcontext(SimpleNamespace(create_bucket=str)))
    monkeypatch.setattr(module, "_fill", lambda *_: None, raising=False)
    figures = module.measure(server("meshd"), SCALE, quiet)
    installed = [name for name in module.CONTENDERS if name != table_row.RAY or find_spec("ray")]
    assert names_in_turn(figures) == balanced(installed)


def test_no_row_has_rounds_of_its_own_order() -> None:
    """Whoever counts rounds asks `bench.interleave` for their order."""
    loop = re.compile(r"in range\((?:\w+\.)?rounds\)")
    folder = Path(bench.__file__).parent
    texts = {file.name: file.read_text() for file in folder.glob("*.py") if file.name != "interleave.py"}
    assert sorted(name for name, text in texts.items() if loop.search(text) and "order(" not in text) == []
    assert len([name for name, text in texts.items() if "bench.interleave import" in text]) >= 14


def test_figures_of_a_process_apart_come_one_by_one() -> None:
    assert [figure.round for figure in apart(counted, 2)] == [0, 1]
    first = next(iter(apart(counted, 1_000_000)))  # the rest is not waited for
    assert first.round == 0
    figures = apart(counted, 3)
    assert [next(figures).round for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ChildError, match="ended with 1"):
        next(figures)


def test_order_leaves_what_it_is_given() -> None:
    names = ["a", "b"]
    assert order(names, 1) == ["b", "a"]
    assert order(names, 2) == names == ["a", "b"]
