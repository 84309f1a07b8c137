"""The examples at toy size: each trains, and what it prints of what it saw is what it should have seen."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import meshsdk as mesh
from examples import arguments, ddp, features, lars, series, sounds, sweep, tokens, toys
from tests.support.interpreters import python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.daemons import Daemon

BUCKET = "toys"
DDP = (f"s3://{BUCKET}/photos", "--batch", "16", "--epochs", "2", "--accumulate", "2", "--warm", "2")


@pytest.fixture(scope="module", autouse=True)
def _toys(daemon: Daemon) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESH_ENDPOINT", daemon.endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
        patch.setenv("OMP_NUM_THREADS", "1")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        toys.main([f"s3://{BUCKET}", "--samples", "96"])
        yield
        torch.set_num_threads(threads)
        with mesh.connect() as client:
            client.delete_many(BUCKET, [entry.key for entry in client.list(BUCKET)])
            client.delete_bucket(BUCKET)


def hashes(output: str) -> list[str]:
    assert re.search(r"samples/s=\d+ stall=\d", output), output
    return re.findall(r"hash=([0-9a-f]{16})", output)


def ranks(number: int, *arguments: str) -> str:
    """What `number` ranks of the data-parallel example print."""
    command = [python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    done = subprocess.run(
        [*command, "-m", "examples.ddp", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHON_EXEC": python()},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_data_parallel_training_goes_on_at_another_world_size(capsys: pytest.CaptureFixture[str]) -> None:
    whole = ddp.main(DDP)
    checkpoint = ("--checkpoint", f"s3://{BUCKET}/ddp.pt")
    ranks(2, *DDP, *checkpoint, "--stop-after", "2")
    assert whole.loader.epoch == 2
    resumed = ddp.main([*DDP, *checkpoint])
    assert (resumed.loader.stats().samples, resumed.steps) == (128, 4)
    first, second = hashes(capsys.readouterr().out)
    assert first == second
    for mine, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-2)  # bfloat16, summed in another order
    ddp.main([*DDP, *checkpoint])  # nothing is left to do
    assert hashes(capsys.readouterr().out) == [first]


def test_the_distributed_model_is_freed_before_its_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch can deadlock where the model is the last to hold the group (pytorch/pytorch#56297)."""
    models, alive = list[weakref.ref[torch.nn.Module]](), list[bool]()
    spread, destroy = ddp.spread, torch.distributed.destroy_process_group

    def record(net: torch.nn.Module, powersgd: int | None) -> torch.nn.Module:
        model = spread(net, powersgd)
        models.append(weakref.ref(model))
        return model

    def leave() -> None:
        alive.extend(model() is not None for model in models)
        destroy()

    monkeypatch.setattr(ddp, "spread", record)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", leave)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ddp.main([*DDP, "--epochs", "1"])
    assert alive == [False]


@pytest.mark.sampled(2)
def test_compressed_gradients_and_layerwise_rates_train_on_the_same_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    once = (*DDP, "--epochs", "1")
    ddp.main([*once, "--optimizer", "lars", "--rate", "1"])
    seen = hashes(capsys.readouterr().out)
    assert hashes(ranks(2, *once, "--powersgd", "1")) == seen


def test_training_stops_early(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = ddp.main([*DDP, "--epochs", "9", "--rate", "0", "--patience", "2"])
    assert stopped.loader.epoch == 3
    assert "epoch=3" in capsys.readouterr().out


def test_rates_rise_and_fall() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    schedule = ddp.warm_up_and_cosine(optimizer, 2, 6)
    rates = []
    for _ in range(6):
        rates.append(round(schedule.get_last_lr()[0], 3))
        optimizer.step()
        schedule.step()
    assert rates == [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]


def test_packed_tokens_are_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    source = (f"s3://{BUCKET}/texts", "--tokenizer", f"s3://{BUCKET}/tokenizer.json")
    losses = tokens.main([*source, "--vocabulary", "320", "--length", "64", "--steps", "12"])
    assert losses[-1] < 0.7 * losses[0]
    assert len(hashes(capsys.readouterr().out)) == 1


def test_a_vocabulary_that_is_too_small_is_told() -> None:
    source = (f"s3://{BUCKET}/texts", "--tokenizer", f"s3://{BUCKET}/tokenizer.json")
    with pytest.raises(SystemExit, match=r"--vocabulary 100: the tokenizer gives the token \d+"):
        tokens.main([*source, "--vocabulary", "100", "--length", "64", "--steps", "12"])


def test_a_text_sees_nothing_of_its_neighbours_and_nothing_ahead() -> None:
    torch.manual_seed(0)
    model = tokens.LanguageModel(vocabulary=32, length=6)
    segments, places = torch.tensor([[1, 1, 1, 2, 2, 0]]), torch.tensor([[0, 1, 2, 0, 1, 0]])
    words = torch.tensor([[1, 2, 3, 4, 5, 0]])
    before = model(words, segments, places)
    words[0, 2] = 9
    after = model(words, segments, places)
    same = [bool(torch.equal(before[0, at], after[0, at])) for at in range(6)]
    assert same == [True, True, False, True, True, True]


def test_series_are_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    errors = series.main([f"s3://{BUCKET}/waves", "--batch", "16", "--epochs", "8"])
    assert errors[-1] < 0.6 * errors[0]
    assert len(hashes(capsys.readouterr().out)) == 1


def test_sounds_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    right = sounds.main([f"s3://{BUCKET}/sounds", "--epochs", "12"])
    assert right[-1] > 0.75
    assert len(hashes(capsys.readouterr().out)) == 1


def test_rows_of_features_are_gathered(capsys: pytest.CaptureFixture[str]) -> None:
    right = features.main([f"s3://{BUCKET}/graph", "--batch", "20"])
    assert right[-1] > max(0.8, right[0])
    assert len(hashes(capsys.readouterr().out)) == 1
    with mesh.connect() as client:
        table = features.Table(client, f"s3://{BUCKET}/graph/features.bin", 32, 8)
        whole = np.frombuffer(client.get(BUCKET, "graph/features.bin"), np.float32).reshape(-1, 32)
        assert np.array_equal(table.read(np.array([5, 90, 5])).numpy(), whole[[5, 90, 5]])
        assert features.width_of(client, f"s3://{BUCKET}/graph/features.bin", 96) == 32
        with pytest.raises(ValueError, match="for each of 95 nodes"):
            features.width_of(client, f"s3://{BUCKET}/graph/features.bin", 95)
        with pytest.raises(ValueError, match="128 bytes"):
            features.Table(client, f"s3://{BUCKET}/graph/features.bin", 33, 8)


@pytest.mark.parametrize(
    ("main", "arguments", "told"),
    [
        (ddp.main, ("--accumulate", "0"), "--accumulate: 0 is not above 0"),
        (sweep.main, ("--trials", "0"), "--trials: 0 is not above 0"),
        (series.main, ("--ahead", "48"), "--ahead 48: these series have 48 time steps"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    main: Callable[[Sequence[str]], object],
    arguments: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"s3://{BUCKET}/waves", *arguments])
    assert told in f"{ended.value} {capsys.readouterr().err}"


def test_help_tells_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ddp.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "rows of a step over all ranks (default: 64)" in shown
    assert "None" not in shown


def test_lars_moves_a_layer_by_a_share_of_its_length() -> None:
    layer, bias = torch.nn.Parameter(torch.full((4, 4), 2.0)), torch.nn.Parameter(torch.zeros(4))
    optimizer = lars.Lars([layer, bias], lr=1.0, momentum=0.0, weight_decay=0.0, trust=0.01)
    for steepness in (1e-3, 1e3):
        before = layer.detach().clone()
        layer.grad, bias.grad = torch.full((4, 4), steepness), torch.ones(4)
        optimizer.step()
        assert torch.allclose((before - layer).norm() / before.norm(), torch.tensor(0.01))
    assert bias.tolist() == [-2.0] * 4


def test_a_sweep_that_is_interrupted_ends_without_a_word() -> None:
    """A terminal interrupts all its processes, those too that are just beginning."""
    source = (f"s3://{BUCKET}/photos", "--batch", "24", "--epochs", "1", "--trials", "3", "--parallel", "2")
    with subprocess.Popen(
        [sys.executable, "-m", "examples.sweep", *source],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert any("of the machine busy" in line for line in running.stdout)
        os.killpg(running.pid, signal.SIGINT)
        _, told = running.communicate(timeout=60)
    assert (running.returncode, told) == (130, "")


def test_ctrl_c_ends_an_example_with_the_shells_code() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        arguments.run(interrupted)
    assert ended.value.code == 130


def test_trials_share_one_pass() -> None:
    source = (f"s3://{BUCKET}/photos", "--batch", "12", "--epochs", "1")
    outcomes = sweep.main([*source, "--trials", "3", "--parallel", "2"])
    assert len({outcome.seen for outcome in outcomes}) == 1
    assert sum(sum(outcome.frames.values()) for outcome in outcomes) == 24
    assert sum(outcome.frames.get("miss", 0) for outcome in outcomes) == 8
    assert [sweep.places(busy, 5) for busy in (0.0, 0.26, 0.9, 1.3)] == [5, 3, 1, 1]
