"""A training script as a user has it, in the public names of `meshsdk` alone and with the `mesh` command: it
runs under any release.

Law: as a program it imports nothing of this repository but the SDK that PYTHONPATH names. It answers each
line of its input, a JSON list of a verb and arguments, with one line of JSON.

    MESH_ENDPOINT=… AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… python training_script.py

TRAINING_DECODE and TRAINING_CROP are the versions of the ops `decode` and `random_resized_crop`, for one who
will resume under releases with later ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import sys
import threading
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import meshsdk
from meshsdk import ops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk import Client, Loader

SOURCE = "s3://training/train"
FIELDS = {"image": "png", "label": "@class"}
OWN_OP = "mine/brighten"
"""Of a module that somebody has pushed."""
SIDE = 160
BATCH = 8
EPOCHS = 3
"""Epochs that differ; a job that goes on takes them in turn."""
PAUSE = 0.2
"""Seconds in which the job computes, after each step."""
PATIENCE = 60.0
"""Seconds for its last step, at most."""


def loader_of(client: Client) -> Loader:
    """Random crops in random order, a few frames ahead: batches are made while the job runs, not before."""
    dataset = meshsdk.open(SOURCE, fields=FIELDS, client=client)
    decode = replace(ops.decode("image"), version=os.environ.get("TRAINING_DECODE", ""))
    crop = replace(ops.random_resized_crop("image", SIDE), version=os.environ.get("TRAINING_CROP", ""))
    dataset = dataset.map(decode, ops.user(OWN_OP, "image", gain=2.0), crop)
    ahead = 4 * BATCH * SIDE * SIDE * 3
    return meshsdk.Loader(dataset, BATCH, seed=11, output="numpy", prefetch_bytes=ahead, deadline=60.0)


def digest(batch: Any) -> str:
    """The samples of a batch, and every byte of it."""
    found = hashlib.sha256(f"{batch.epoch}.{batch.step}".encode())
    for values in (batch.positions, batch.status, *(batch[name] for name in sorted(batch))):
        found.update(f"\0{values.dtype}{values.shape}".encode())
        found.update(np.ascontiguousarray(values).tobytes())
    return found.hexdigest()[:16]


def epoch(number: int) -> list[str]:
    """The digests of all steps of an epoch, by a client that knows nothing yet."""
    with meshsdk.connect() as client, loader_of(client) as loader:
        loader.seek(number)
        return [digest(batch) for batch in loader]


def checkpoint(place: str, number: int, steps: int) -> list[str]:
    """Read the first steps of an epoch, and leave the loader's state at a place: as JSON, and pickled."""
    with meshsdk.connect() as client, loader_of(client) as loader:
        loader.seek(number)
        found = []
        for batch in loader:
            found.append(digest(batch))
            if len(found) == steps:
                break
        state = loader.state_dict()
    Path(place, "state.json").write_text(json.dumps(state))
    Path(place, "state.pickle").write_bytes(pickle.dumps(state))
    return found


def resume(place: str) -> list[list[str]]:
    """The rest of the epoch that a state stands in, from its JSON and from its pickle."""
    pickled = pickle.loads(Path(place, "state.pickle").read_bytes())
    found = []
    for state in (json.loads(Path(place, "state.json").read_text()), pickled):
        with meshsdk.connect() as client, loader_of(client) as loader:
            loader.load_state_dict(state)
            found.append([digest(batch) for batch in loader])
    return found


def objects(bucket: str, prefix: str) -> dict[str, str]:
    """What the SDK's own client lists and reads."""
    with meshsdk.connect() as client:
        keys = [entry.key for entry in client.list(bucket, prefix)]
        return {key: hashlib.sha256(client.get(bucket, key)).hexdigest() for key in keys}


def put(bucket: str, key: str, text: str) -> bool:
    """Write with the SDK's own client; whether it reads the same."""
    with meshsdk.connect() as client:
        client.put(bucket, key, text.encode())
        return client.get(bucket, key) == text.encode()


def command(*words: str) -> tuple[int, str]:
    """The exit code and the output of a `mesh` command."""
    from meshsdk.cli import run

    with redirect_stdout(io.StringIO()) as said:
        code = run(list(words))
    return code, said.getvalue()


class Training:
    """A job that goes on in a thread, with one client and one loader, until it is told to stop."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._stop = threading.Event()
        self.steps: list[tuple[int, int, str]] = []
        self.error = ""

    def begin(self) -> int:
        self._thread.start()
        return 0

    def steps_so_far(self) -> int:
        return len(self.steps)

    def end(self) -> dict[str, Any]:
        """Each (epoch, step, digest), and what an ordinary job would have died of."""
        self._stop.set()
        self._thread.join(PATIENCE)
        error = "the job does not end" if self._thread.is_alive() else self.error
        return {"steps": self.steps, "error": error}

    def _run(self) -> None:
        try:
            with meshsdk.connect() as client, loader_of(client) as loader:
                for at, batch in self._batches(loader):
                    self.steps.append((at, batch.step, digest(batch)))
                    if self._stop.wait(PAUSE):
                        return
        except Exception as error:  # noqa: BLE001, RUF100 - whatever it is, it is what is looked for
            self.error = f"{type(error).__name__}: {error}"

    def _batches(self, loader: Loader) -> Iterator[tuple[int, Any]]:
        for turn in count():
            loader.seek(turn % EPOCHS)
            for batch in loader:
                yield turn % EPOCHS, batch


def main() -> None:
    training = Training()
    verbs: dict[str, Any] = {
        "epoch": epoch,
        "checkpoint": checkpoint,
        "resume": resume,
        "objects": objects,
        "put": put,
        "command": command,
        "begin": training.begin,
        "steps": training.steps_so_far,
        "end": training.end,
    }
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(verbs[verb](*arguments)), flush=True)


if __name__ == "__main__":
    main()
