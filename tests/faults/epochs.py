"""An epoch of training as a program would run it, one digest a step: whatever happens to nodes meanwhile, it
is the epoch of a mesh nothing happened to.

Law: the SDK as anybody uses it. Frames come a few at a time, so that whoever iterates decides between which
steps something happens. Augmentation is part of it: what is compared was made by the mesh, not only kept.
"""

from __future__ import annotations

import hashlib
import io
import threading
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

import meshsdk
from meshsdk import ops
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshsdk.client.s3_client import Client

BUCKET: Final = "training"
SIDE: Final = 160
BATCH: Final = 8
EPOCHS: Final = 16
"""Epochs that differ."""
_STEP: Final = 0.1
"""Seconds in which the training job computes, after each step."""
_AHEAD: Final = 4 * BATCH * SIDE * SIDE * 3


def picture(number: int) -> bytes:
    """A small PNG, another one for each number."""
    noise = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def connect(endpoints: Sequence[str], keys: tuple[str, str], deadline: float = 120.0) -> Client:
    """A client that knows these endpoints of the mesh."""
    return meshsdk.connect(
        ",".join(endpoints), access_key=keys[0], secret_key=keys[1], deadline=deadline, timeout=30.0
    )


def fill(client: Client, samples: int) -> None:
    """Stores what is trained on. The same samples make the same epochs."""
    if not client.has_bucket(BUCKET):
        client.create_bucket(BUCKET)
    for number in range(samples):
        client.put(BUCKET, f"train/{'cat' if number % 3 else 'dog'}/{number:05d}.png", picture(number))


def loader(client: Client, *, seed: int = 3, deadline: float = 120.0, **more: Any) -> meshsdk.Loader:
    """Random crops of every picture, in random order."""
    dataset = meshsdk.open(f"s3://{BUCKET}/train", fields={"image": "png"}, client=client)
    dataset = dataset.map(ops.decode("image"), ops.random_resized_crop("image", SIDE))
    more = {"prefetch_bytes": _AHEAD, "output": "numpy", "deadline": deadline, **more}
    return meshsdk.Loader(dataset, BATCH, seed=seed, **more)


def epoch(
    endpoints: Sequence[str],
    keys: tuple[str, str],
    number: int = 0,
    *,
    seed: int = 3,
    deadline: float = 120.0,
    **more: Any,
) -> Iterator[str]:
    """The digests of an epoch's batches, a step each time it is asked. Raises whatever the SDK raises: there
    is to be nothing."""
    with (
        connect(endpoints, keys, deadline) as client,
        loader(client, seed=seed, deadline=deadline, **more) as training,
    ):
        training.set_epoch(number)
        for batch in training:
            yield _digest(batch.step, batch)


def _digest(step: int, batch: Any) -> str:
    found = hashlib.sha256(f"{step}".encode())
    for name in sorted(batch):
        found.update(f"\0{name}\0{batch[name].dtype}{batch[name].shape}".encode())
        found.update(np.ascontiguousarray(batch[name]).tobytes())
    found.update(batch.status.tobytes())
    return found.hexdigest()[:16]


class References:
    """The digests of epochs by number, each computed once: on a mesh that nothing befalls at that time. What
    is trained on stays the same."""

    def __init__(self, endpoints: Sequence[str], keys: tuple[str, str]) -> None:
        self._endpoints, self._keys, self._known = tuple(endpoints), keys, dict[int, list[str]]()

    def __repr__(self) -> str:
        return f"<References of {len(self._known)} epochs>"

    def __getitem__(self, number: int) -> list[str]:
        if number not in self._known:
            self._known[number] = list(epoch(self._endpoints, self._keys, number))
        return self._known[number]


class Trainer:
    """Epochs in a thread, one after the other from `first` on, until told to stop: what runs under faults.
    After `EPOCHS` of them it begins again. `steps` has every digest by (epoch, step), in order; `errors` what
    an ordinary program would have died of."""

    def __init__(
        self, endpoints: Sequence[str], keys: tuple[str, str], deadline: float = 120.0, first: int = 0
    ) -> None:
        self._endpoints, self._keys, self._deadline = tuple(endpoints), keys, deadline
        self._first = first
        self.steps = list[tuple[int, int, str]]()
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer")

    def __repr__(self) -> str:
        return f"<Trainer {len(self.steps)} steps, {len(self.errors)} errors>"

    def start(self) -> None:
        """Begin with the first epoch."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step at hand, and wait for that."""
        self._stop.set()
        await_end(self._thread, patience=2 * self._deadline)

    def _run(self) -> None:
        for number in count(self._first):
            try:
                steps = epoch(self._endpoints, self._keys, number % EPOCHS, deadline=self._deadline)
                for step, digest in enumerate(steps):
                    self.steps.append((number % EPOCHS, step, digest))
                    if self._stop.wait(_STEP):
                        return
            except Exception as error:  # noqa: BLE001, RUF100 - all of them are what is looked for
                self.errors.append(f"epoch {number}: {type(error).__name__}: {error}"[:400])
                return

    def check(self, references: References) -> list[str]:
        """What is wrong, one line each: every step is compared with that of an undisturbed epoch."""
        faults = list(self.errors)
        for number, step, digest in self.steps:
            expected = references[number]
            found = expected[step] if step < len(expected) else "nothing"
            if digest != found:
                faults.append(f"epoch {number}, step {step} was {digest}, and is {found}")
        return faults
