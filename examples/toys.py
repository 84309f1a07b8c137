"""Toy data for the examples, so that they run without yours: photographs, masks, texts, waves,
a graph, sounds.

    python -m examples.toys s3://toys

Law: the same bytes each time. Needs what the server needs (Pillow, tokenizers), and zarr.
"""

from __future__ import annotations

import io
import json
import wave
from typing import TYPE_CHECKING, Any

import numpy as np

import meshsdk as mesh
from examples.arguments import command_line, positive, run, show_progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COLOURS = {"blue": (30, 40, 220), "green": (30, 200, 60), "red": (220, 40, 30)}


def photographs(count: int) -> Iterator[tuple[str, bytes]]:
    """`photos/COLOUR/NUMBER.jpg`: noise around a colour, which is what there is to learn."""
    from PIL import Image

    random = np.random.default_rng(7)
    for number in range(count):
        name = list(COLOURS)[number % len(COLOURS)]
        pixels = np.clip(random.normal(COLOURS[name], 60, (40, 48, 3)), 0, 255).astype(np.uint8)
        body = io.BytesIO()
        Image.fromarray(pixels).save(body, "JPEG")
        yield f"photos/{name}/{number:05}.jpg", body.getvalue()


def scenes(count: int) -> Iterator[tuple[str, bytes]]:
    """`scenes/NUMBER.jpg` with two discs, and `NUMBER.png`: a mask of their classes, with a palette."""
    from PIL import Image

    random, (y, x) = np.random.default_rng(7), np.mgrid[:40, :48]
    for number in range(count):
        mask = np.zeros((40, 48), np.uint8)
        for class_, (row, column) in enumerate(random.integers(6, 34, (2, 2)), 1):
            mask[(y - row) ** 2 + (x - column) ** 2 < 36] = class_
        pixels = np.clip(random.normal(0, 20, (40, 48, 3)) + 60 + 80 * mask[:, :, None], 0, 255)
        labelled = Image.frombytes("P", (48, 40), mask.tobytes())
        labelled.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
        for image, form, ending in (
            (Image.fromarray(pixels.astype(np.uint8)), "JPEG", "jpg"),
            (labelled, "PNG", "png"),
        ):
            body = io.BytesIO()
            image.save(body, form)
            yield f"scenes/{number:05}.{ending}", body.getvalue()


def texts(count: int) -> Iterator[tuple[str, bytes]]:
    """`texts/part-N.jsonl` and the `tokenizer.json` that was trained on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    refrain = "the cat sat on the mat. "
    written = [f"{refrain * (number % 5)}it was number {number}." for number in range(count)]
    half = count // 2
    for part, lines in enumerate((written[:half], written[half:])):
        yield f"texts/part-{part}.jsonl", "\n".join(json.dumps({"text": line}) for line in lines).encode()
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(written, trainer)
    yield "tokenizer.json", tokenizer.to_str().encode()


def waves(count: int) -> Iterator[tuple[str, bytes]]:
    """`waves`: a Zarr v3 array float32 [count, 48], a chunk a row, sixteen rows a shard."""
    import zarr

    random, time = np.random.default_rng(7), np.arange(48)
    speed, phase = random.uniform(0.1, 0.5, (count, 1)), random.uniform(0, 6, (count, 1))
    stored: dict[str, Any] = {}
    array = zarr.create_array(
        zarr.storage.MemoryStore(stored), shape=(count, 48), chunks=(1, 48), shards=(16, 48), dtype="float32"
    )
    array[:] = np.sin(speed * time + phase)
    for key, value in stored.items():
        yield f"waves/{key}", value.to_bytes()


def graph(count: int) -> Iterator[tuple[str, bytes]]:
    """`graph/`: nodes of three kinds, each near its kind's mean, its six neighbours of its own kind."""
    random = np.random.default_rng(7)
    labels = random.integers(0, 3, count)
    features = random.normal(0, 1, (3, 32))[labels] + random.normal(0, 2, (count, 32))
    kinds = [np.flatnonzero(labels == kind) for kind in range(3)]
    neighbours = np.stack([random.choice(kinds[label], 6) for label in labels])
    yield "graph/features.bin", features.astype(np.float32).tobytes()
    for name, array in (("neighbours", neighbours), ("labels", labels)):
        body = io.BytesIO()
        np.save(body, array)
        yield f"graph/{name}.npy", body.getvalue()


def sounds(count: int) -> Iterator[tuple[str, bytes]]:
    """`sounds/train/CLASS/NUMBER.wav`, every fourth in `test`: low, middle and high tones in noise."""
    random, rate = np.random.default_rng(7), 8_000
    for number in range(count):
        name, pitch = [("high", 2_000), ("low", 300), ("middle", 800)][number % 3]
        time = np.arange(int(rate * random.uniform(0.4, 0.7))) / rate
        tone = 0.1 * np.sin(2 * np.pi * pitch * random.uniform(0.8, 1.3) * time)
        values = np.clip(tone + random.normal(0, 0.2, len(time)), -1, 1) * 32_767
        body = io.BytesIO()
        with wave.open(body, "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(values.astype("<i2").tobytes())
        part = "test" if number // 3 % 4 == 3 else "train"
        yield f"sounds/{part}/{name}/{number:05}.wav", body.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("examples.toys", __doc__)
    parser.add_argument("target", help="where to put them, as s3://toys")
    parser.add_argument("--samples", type=positive, default=192, help="of each kind")
    options = parser.parse_args(arguments)
    bucket, _, prefix = options.target.removeprefix("s3://").rstrip("/").partition("/")
    with mesh.connect() as client:
        client.create_bucket(bucket)
        for make in (photographs, scenes, texts, waves, graph, sounds):
            for number, (name, body) in enumerate(make(options.samples), 1):
                client.put(bucket, f"{prefix}/{name}" if prefix else name, body)
                show_progress(f"{make.__name__}: {number} objects")
            show_progress("")
    print(f"{options.samples} photographs, scenes, texts, waves, nodes and sounds are below {options.target}")


if __name__ == "__main__":
    run(main)
