"""Adapters of Grain and `datasets`, and of libraries that are too large for the development environment: run
where they are, else what of them needs no library. `pip install --group adapters` brings them."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.adapters.dali import ExternalSource
from meshsdk.adapters.plain import plain_types
from meshsdk.adapters.rays import FetchSamples
from meshsdk.adapters.tensorflow import RepeatableEpochs
from tests.support.interpreters import python
from tests.support.required import required_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

libraries = pytest.mark.filterwarnings("ignore")  # theirs, on a torch that is newer than they are


@pytest.fixture
def dataset(daemon: Daemon, bucket: str) -> Iterator[mesh.Dataset]:
    """Twenty samples that are their own number, and a text of that length."""
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        for number in range(20):
            client.put(bucket, f"n/{number:02}.cls", str(number).encode())
            client.put(bucket, f"n/{number:02}.txt", b"x" * number)
        opened = mesh.open(f"s3://{bucket}/n", fields={"n": "cls", "text": "txt"}, client=client)
        yield opened.map(ops.int_label("n"))


def loader(dataset: mesh.Dataset, **more: Any) -> mesh.Loader:
    return mesh.Loader(dataset, 4, seed=3, output="numpy", **more)


# --- what needs no library ------------------------------------------------------------------------


def test_what_batches_are_is_told_beforehand(dataset: mesh.Dataset) -> None:
    with loader(dataset) as batches:
        assert {name: (str(dtype), shape) for name, (dtype, shape) in plain_types(batches).items()} == {
            "n": ("int64", (None,)),
            "text.data": ("uint8", (None,)),
            "text.offsets": ("int64", (None,)),
            "__pos": ("int64", (None,)),
            "__status": ("uint8", (None,)),
        }
        assert (batches.epoch, batches.step) == (0, 0)


def test_what_batches_are_is_told_where_a_resumed_epoch_has_none_left(dataset: mesh.Dataset) -> None:
    with mesh.Loader(dataset, 6, seed=3) as before:
        before.skip(1)
        state = before.state_dict()
    with mesh.Loader(dataset, 16, seed=3, output="numpy", tail="drop") as batches:
        whole = plain_types(batches)
        batches.load_state_dict(state | {"plan": batches.plan.hash})
        assert batches.remaining == 0
        assert plain_types(batches) == whole
        assert (batches.epoch, batches.step) == (0, 0)
        with pytest.raises(IndexError, match="no full batch is left"):
            batches.at(0)


def test_a_task_of_ray_fetches_its_samples(dataset: mesh.Dataset) -> None:
    fetch = pickle.loads(pickle.dumps(FetchSamples(dataset)))
    found = fetch({"id": np.array([3, 19, 0])})
    assert found["n"].tolist() == [3, 19, 0]
    assert [len(text) for text in found["text"]] == [3, 19, 0]
    assert fetch({"id": np.array([2, 2])})["text"].shape == (2, 2)
    assert fetch({"id": np.array([], int)}) == {}


def test_dalis_source_gives_an_epoch_at_a_time(dataset: mesh.Dataset) -> None:
    with loader(dataset) as batches:
        source = ExternalSource(batches, ["n", "__status"])
        for epoch in range(2):
            assert batches.epoch == epoch
            numbers = [int(value) for n, status in source for value in n[status == 0]]
            assert sorted(numbers) == list(range(20))


def test_an_epoch_for_tensorflow_that_was_left_begins_again(dataset: mesh.Dataset) -> None:
    """Keras takes a batch to build a model, on JAX and torch, and iterates from the beginning after it."""
    with loader(dataset) as batches:
        epochs = RepeatableEpochs(batches)
        first = [next(epochs())["n"].tolist() for _ in range(2)]
        whole = [batch["n"].tolist() for batch in epochs()]
        assert first == [whole[0]] * 2
        assert sorted(itertools.chain(*whole)) == list(range(20))
        second = [batch["n"].tolist() for batch, _ in zip(epochs(), range(5), strict=False)]
        assert sorted(itertools.chain(*second)) == list(range(20))
        assert batches.epoch == 2
        third = [next(epochs())["n"].tolist(), *[batch["n"].tolist() for batch in epochs()]]
        assert third[0] == third[1]
        assert third[1:] not in (whole, second)
        next(epochs())
        batches.seek(0, 3)
        assert [batch["n"].tolist() for batch in epochs()] == whole[3:]


# --- Lightning by its other name -------------------------------------------------------------------


@libraries
@pytest.mark.parametrize(
    ("imported", "taken"),
    [
        ("lightning.pytorch", "lightning.pytorch"),
        ("pytorch_lightning", "pytorch_lightning"),
        ("", "lightning.pytorch"),
    ],
)
def test_the_lightning_that_is_imported_is_taken(
    monkeypatch: pytest.MonkeyPatch, imported: str, taken: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "meshsdk.adapters.lightning", raising=False)
    made = {name: types.ModuleType(name) for name in ("lightning.pytorch", "pytorch_lightning")}
    for module in made.values():
        for name in ("LightningDataModule", "Callback"):
            setattr(module, name, type(name, (), {}))
    monkeypatch.setattr("importlib.import_module", lambda name: made[name])
    if imported:
        monkeypatch.setitem(sys.modules, imported, made[imported])
    spec = importlib.util.find_spec("meshsdk.adapters.lightning")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert issubclass(fresh.MeshDataModule, made[taken].LightningDataModule)
    assert issubclass(fresh.DataStats, made[taken].Callback)


# --- Grain ----------------------------------------------------------------------------------------


@libraries
def test_a_grain_pipeline_resumes(dataset: mesh.Dataset) -> None:
    grain = required_module("grain")
    from meshsdk.adapters.grains import LoaderDataset

    def pipeline() -> Any:
        return LoaderDataset(loader(dataset)).map(lambda batch: (batch["n"] * 2).tolist())

    whole = list(pipeline())
    assert sorted(itertools.chain(*whole)) == list(range(0, 40, 2))
    first = iter(pipeline())
    begun = [next(first), next(first)]
    resumed = iter(pipeline())
    resumed.set_state(first.get_state())
    assert begun + list(resumed) == whole
    samples = grain.MapDataset.source(dataset).shuffle(seed=1).map(lambda sample: int(sample["n"]))
    assert sorted(samples[number] for number in range(20)) == list(range(20))


# --- Hugging Face ---------------------------------------------------------------------------------


@libraries
def test_samples_are_an_iterable_dataset(dataset: mesh.Dataset) -> None:
    required_module("datasets")
    from meshsdk.adapters.huggingface import as_iterable

    samples = as_iterable(dataset, shards=4)
    assert [int(sample["n"]) for sample in samples] == list(range(20))
    shuffled = samples.shuffle(seed=1, buffer_size=3)
    assert sorted(int(sample["n"]) for sample in shuffled) == list(range(20))
    assert as_iterable(dataset.filter("index < 3")).num_shards == 3


@libraries
def test_files_are_streamed_by_their_urls(
    daemon: Daemon, dataset: mesh.Dataset, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` gives the file system what is meant for `open`, as an encoding."""
    datasets = required_module("datasets")
    from meshsdk.adapters.filesystems import MeshFileSystem

    MeshFileSystem.clear_instance_cache()
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    files = f"mesh://{bucket}/n/0*.txt"
    lines = datasets.load_dataset("text", data_files=files, split="train", streaming=True)
    assert [line["text"] for line in lines] == ["x" * number for number in range(1, 10)]
    MeshFileSystem.clear_instance_cache()


@libraries
def test_a_trainer_resumes_in_the_middle_of_an_epoch(dataset: mesh.Dataset, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import torch

    from meshsdk.adapters.huggingface import FedByLoader
    from meshsdk.errors import ConfigurationError

    class MeshTrainer(FedByLoader, transformers.Trainer):  # type: ignore[name-defined,misc]
        pass

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def forward(self, n: Any, labels: Any = None) -> dict[str, Any]:
            self.seen.append(n.tolist())
            return {"loss": self.layer(n.float()[:, None]).mean()}

    class Stop(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    def run(name: str, *callbacks: Any, resume: Any = None) -> list[list[int]]:
        model = Model()
        arguments = transformers.TrainingArguments(
            str(tmp_path / name),
            num_train_epochs=2,
            save_steps=3,
            report_to=[],
            use_cpu=True,
            per_device_train_batch_size=4,
            disable_tqdm=True,
        )
        trainer = MeshTrainer(
            model,
            arguments,
            loader=mesh.Loader(dataset, 4, seed=3),
            inputs=lambda batch: {"n": batch["n"]},
            callbacks=list(callbacks),
        )
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume)
        return model.seen

    whole = run("whole")
    assert len(whole) == 10
    assert run("stopped", Stop()) == whole[:3]
    assert run("stopped", resume=True) == whole[3:]
    with pytest.raises(ConfigurationError, match="FedByLoader"):
        run("none", resume=str(tmp_path))


@libraries
@pytest.mark.parametrize("world", [1, 2])
def test_an_evaluation_counts_each_sample_once(
    daemon: Daemon, dataset: mesh.Dataset, bucket: str, world: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    env = os.environ | {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": python(),
    }
    program = Path(__file__).with_name("evaluating_trainer.py")
    argv = [python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*argv, str(program), f"s3://{bucket}/n/", str(tmp_path)],
        env=env, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert told == [{"labels": list(range(20)), "others": list(range(20)), "again": list(range(20))}]


@libraries
def test_a_trainer_logs_what_its_loader_does(dataset: mesh.Dataset, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import torch

    from meshsdk.adapters.huggingface import FedByLoader

    class MeshTrainer(FedByLoader, transformers.Trainer):  # type: ignore[name-defined,misc]
        pass

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, n: Any) -> dict[str, Any]:
            return {"loss": self.layer(n.float()[:, None]).mean()}

    def logged(**more: Any) -> list[dict[str, float]]:
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=2, logging_steps=5, save_strategy="no", report_to=[],
            use_cpu=True, per_device_train_batch_size=4, disable_tqdm=True,
        )  # fmt: skip
        with mesh.Loader(dataset, 4, seed=3) as batches:
            trainer = MeshTrainer(
                Model(), arguments, loader=batches, inputs=lambda batch: {"n": batch["n"]}, **more
            )
            trainer.train()
            assert batches.stats().samples == 40
        return [each for each in trainer.state.log_history if "loss" in each]

    windows = logged()
    assert [each["step"] for each in windows] == [5, 10]
    assert all(0 <= each["data/wait_share"] <= 1 for each in windows)
    assert all(each["data/samples_per_second"] > 0 for each in windows)
    assert not [name for each in logged(log_data=False) for name in each if name.startswith("data/")]


@libraries
@pytest.mark.parametrize("world", [1, 2])
def test_accelerate_resumes_a_registered_loader(
    daemon: Daemon, dataset: mesh.Dataset, bucket: str, world: int, tmp_path: Path
) -> None:
    """The ranks' parts of each batch are the batch of one rank, before and after `load_state`."""
    pytest.importorskip("accelerate")
    program = Path(__file__).with_name("accelerated_loop.py")
    with loader(dataset) as batches:
        whole = [sorted(batch["n"].tolist()) for batch in batches]
    seen: list[list[int]] = []
    for _ in range(2):  # the first ends in the epoch, after a checkpoint; the second goes on from it
        found = _ranks(daemon, world, program, f"s3://{bucket}/n/", str(tmp_path))
        assert len(found) == world
        seen += [sorted(sum(parts, [])) for parts in zip(*found, strict=True)]  # noqa: RUF017
    assert seen == whole


def _ranks(daemon: Daemon, world: int, program: Path, *arguments: str) -> list[list[list[int]]]:
    """What each rank under torchrun prints."""
    env = os.environ | {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": python(),
    }
    argv = [python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*argv, str(program), *arguments], env=env, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]


# --- JAX and Keras --------------------------------------------------------------------------------


@libraries
def test_processes_of_jax_are_ranks(daemon: Daemon, dataset: mesh.Dataset, bucket: str) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("pip install --group adapters")
    env = os.environ | {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        "JAX_PLATFORMS": "cpu",
    }
    program = Path(__file__).with_name("jax_processes.py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = "{}:{}".format(*free.getsockname())
    started = [
        subprocess.Popen(
            [sys.executable, str(program), f"s3://{bucket}/n/", place, str(number)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait(10)
    assert [process.returncode for process in started] == [0, 0], told
    parts = [json.loads(out) for out, _ in told]
    with loader(dataset) as batches:
        whole = [batch["n"].tolist() for batch in batches]
    assert [first + second for first, second in zip(*parts, strict=True)] == whole


@libraries
def test_arrays_of_jax_stay_when_the_loader_goes_on(
    dataset: mesh.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX takes memory of NumPy without a copy where it can: the loader must not use it again."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    jax = pytest.importorskip("jax")
    with loader(dataset, prefetch_bytes=150_000) as batches:  # room for few batches
        for _ in range(3):
            expected, kept = [], []
            for batch in batches:
                expected.append(batch["n"].tolist())
                kept.append(jax.device_put(batch["n"]))
            del batch
            assert [each.tolist() for each in kept] == expected


@libraries
def test_keras_trains_on_endless_tuples(dataset: mesh.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))  # or what is loaded already
    keras = pytest.importorskip("keras")
    from meshsdk.adapters.keras import DataStats, endless_tuples

    with loader(dataset) as batches:
        model = keras.Sequential([keras.layers.Rescaling(1.0), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        found = model.fit(
            ((n[:, None].astype("float32"), n) for n, _ in endless_tuples(batches, "n", "__status")),
            steps_per_epoch=len(batches), epochs=2, verbose=0, callbacks=[DataStats(batches)],
        )  # fmt: skip
        history = found.history
        assert len(history["loss"]) == 2
        assert all(share <= 1 for share in history["data/wait_share"])
        assert all(rate > 0 for rate in history["data/samples_per_second"])


# --- TensorFlow -----------------------------------------------------------------------------------


@libraries
def test_a_tf_dataset_is_an_epoch_at_a_time(dataset: mesh.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = pytest.importorskip("tensorflow")
    from meshsdk.adapters.tensorflow import as_tf_dataset

    with loader(dataset) as batches:
        given = as_tf_dataset(batches).map(lambda batch: {**batch, "n": batch["n"] * 2}).prefetch(1)
        assert given.element_spec["n"] == tf.TensorSpec((None,), tf.int64)
        for epoch in range(2):
            assert batches.epoch == epoch
            numbers = [int(n) for batch in given for n in batch["n"].numpy()[batch["__status"].numpy() == 0]]
            assert sorted(numbers) == list(range(0, 40, 2))


@libraries
def test_keras_trains_on_a_tf_dataset(dataset: mesh.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = pytest.importorskip("tensorflow")
    from meshsdk.adapters.tensorflow import as_tf_dataset

    def pair(batch: Any) -> tuple[Any, Any]:
        rows = tf.cast(batch["n"], tf.float32)[:, None]
        return rows, 2 * rows

    with loader(dataset) as batches:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        ended: list[int] = []
        counting = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: ended.append(step))
        model.fit(as_tf_dataset(batches).map(pair), epochs=2, verbose=0, callbacks=[counting])
        assert (batches.epoch, batches.step) == (2, 0)
    assert ended == [*range(5), *range(5)]


# --- Ray ------------------------------------------------------------------------------------------


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A Ray of this machine, ended with the test."""
    found = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    found.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield found
    found.shutdown()


@libraries
def test_a_ray_dataset_has_every_sample(ray: Any, dataset: mesh.Dataset, tmp_path: Path) -> None:
    from meshsdk.adapters.rays import as_ray_dataset

    samples = as_ray_dataset(dataset, rows=8)
    rows = samples.filter(lambda row: row["n"] >= 10).take_all()
    assert sorted(row["n"] for row in rows) == list(range(10, 20))
    assert {len(row["text"]) for row in rows} == set(range(10, 20))
    samples.select_columns(["n"]).write_parquet(str(tmp_path / "rows"))
    assert sorted(row["n"] for row in ray.data.read_parquet(str(tmp_path / "rows")).take_all()) == [
        *range(20)
    ]


@libraries
def test_trials_of_ray_tune_share_a_pass(ray: Any, dataset: mesh.Dataset, tmp_path: Path) -> None:
    from ray import tune

    def trial(config: dict[str, Any]) -> dict[str, Any]:
        with mesh.Loader(dataset, 4, seed=3, output="numpy", share="sweep") as batches:
            seen = [batch["n"].tolist() for batch in batches]
            return {"seen": seen, "prepared": batches.stats().frames.get("miss", 0)}

    tuner = tune.Tuner(
        trial,
        param_space={"rate": tune.grid_search([0.1, 0.2, 0.3])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    found = [result.metrics for result in tuner.fit()]
    assert len(found) == 3
    assert {str(each["seen"]) for each in found} == {str(found[0]["seen"])}
    assert sum(each["prepared"] for each in found) == len(found[0]["seen"])


@libraries
def test_workers_of_ray_train_are_ranks(ray: Any, dataset: mesh.Dataset, tmp_path: Path) -> None:
    required_module("torch")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def work(config: dict[str, Any]) -> None:
        from torch import distributed

        with loader(dataset) as batches:
            rows = [number for batch in batches for number in batch["n"][batch.status == 0].tolist()]
        (tmp_path / f"rank-{distributed.get_rank()}").write_text(json.dumps(rows))

    TorchTrainer(
        work,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
    ).fit()
    parts = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert [len(part) for part in parts] == [10, 10]
    assert sorted(parts[0] + parts[1]) == list(range(20))


@libraries
@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_trackers_hold_the_windows_that_were_logged(
    tracker: str, dataset: mesh.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/doctor.md logs them, and as the trackers' own readers find them."""
    library = pytest.importorskip(tracker)
    log, histories = (_mlflow if tracker == "mlflow" else _wandb)(library, tmp_path, monkeypatch)
    logged: list[dict[str, float]] = []
    with mesh.Loader(dataset, 4, seed=3) as batches:
        before = batches.stats()
        for step, _ in enumerate(batches, 1):
            window, before = batches.stats(since=before), batches.stats()
            logged.append(window.scalars("data/"))
            log(logged[-1], step)
    assert len(logged) == 5
    assert all(0 <= each["data/wait_share"] <= 1 for each in logged)
    assert all(each["data/samples_per_second"] > 0 for each in logged[1:])
    assert histories() == {name: [each[name] for each in logged] for name in logged[0]}


def _mlflow(mlflow: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Returns what logs to a run of MLflow, and what ends it and reads its metrics back."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    mlflow.set_tracking_uri((folder / "runs").as_uri())
    run = mlflow.start_run()

    def histories() -> dict[str, list[float]]:
        mlflow.end_run()
        client = mlflow.MlflowClient()
        names = client.get_run(run.info.run_id).data.metrics
        return {
            name: [each.value for each in client.get_metric_history(run.info.run_id, name)] for name in names
        }

    return lambda figures, step: mlflow.log_metrics(figures, step=step), histories


def _wandb(wandb: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The same for an offline run of W&B, whose file is decoded: it has no reader for Python."""
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=folder, project="figures")

    def histories() -> dict[str, list[float]]:
        run.finish()
        wandb.teardown()  # ends its process
        [path] = folder.rglob("run-*.wandb")
        found: dict[str, list[float]] = {}
        for data in _log_records(path.read_bytes(), first=7):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if name.startswith("data/"):
                    found.setdefault(name, []).append(json.loads(item.value_json))
        return found

    return lambda figures, step: run.log(figures, step=step), histories


def _log_records(log: bytes, first: int) -> Iterator[bytes]:
    """Yields the records of a log in LevelDB's format: pieces with a checksum, a length and a type, none of
    which crosses a block."""
    block, header, last_pieces = 1 << 15, struct.Struct("<IHB"), (1, 4)
    at, found = first, b""
    while at + header.size <= len(log):
        if block - at % block < header.size:
            at += block - at % block
            continue
        _, size, kind = header.unpack_from(log, at)
        found += log[at + header.size : at + header.size + size]
        at += header.size + size
        if kind in last_pieces:
            yield found
            found = b""
