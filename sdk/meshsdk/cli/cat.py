"""`mesh cat` and `mesh head`: bytes of objects, and the dataset a folder would form."""

from __future__ import annotations

import codecs
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.path_arguments import Remote, RemoteType
from meshsdk.errors import ConfigurationError, NotFoundError, ServerError
from meshwire.dataset.archive_paths import archive_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.cli.command_base import Session, Steps
    from meshsdk.client.native_api import FieldSchema
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.open_dataset import Kind


_SHOWN = 60  # characters of a text


@click.command()
@click.argument("urls", type=RemoteType(), nargs=-1, required=True)
@click.option("--offset", type=click.IntRange(0), default=0, help="First byte.")
@click.option("--length", type=click.IntRange(0), help="Number of bytes [default: up to the end].")
@shared_options
def cat(session: Session, urls: Sequence[Remote], offset: int, length: int | None) -> None:
    """Write objects to standard output, one after the other.

    \b
    mesh cat s3://logs/today.txt | grep error
    mesh cat --offset 512 --length 100 s3://photos/shard-000.tar
    """
    from meshsdk.transfers import stream

    for url in urls:
        if not url.key:
            raise ConfigurationError(f"{url} is a bucket; list it with `mesh ls {url}`")
    output = sys.stdout.buffer
    with session.make_client() as client:
        for url in urls:
            for piece in stream(client, url.bucket, url.key, offset=offset, length=length):
                output.write(piece)
    output.flush()


class KindType(click.Choice[str]):
    """A kind of dataset; another word fails with the kind that it may stand for."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            from meshsdk.open_dataset import kind_hint

            self.fail(f"there is no kind {value!r}{kind_hint(value)}", param, ctx)
        return super().convert(value, param, ctx)


KIND_OPTION = click.option(
    "--kind",
    type=KindType(
        ["auto", "objects", "tar", "lines", "zarr", "chunks", "tfrecord", "mds", "table", "parquet", "tokens"]
    ),
    default="auto",
    help="What a sample is: files with one stem, the same in archives, a line (JSONL), a row or chunk of "
    "Zarr arrays, a record (TFRecord, MDS), a row of a table (Parquet, Arrow), a sequence of token files.",
)


@click.command()
@click.argument("url", type=RemoteType())
@click.option(
    "-c", "--bytes", "count", type=click.IntRange(0), default=512, help="Bytes to show of an object."
)
@click.option("-n", "--samples", type=click.IntRange(0), default=3, help="Samples to show of a dataset.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    help="NAME=EXT[;EXT], NAME=@class, or NAME=ARRAY_OR_FEATURE [default: guessed].",
)
@KIND_OPTION
@click.option("--filter", "condition", help="Only samples for which this expression is true.")
@shared_options
def head(
    session: Session,
    url: Remote,
    count: int,
    samples: int,
    fields: Sequence[str],
    kind: Kind,
    condition: str | None,
) -> None:
    """Write the first bytes of an object; for a folder, or with --field or --kind, the fields and first
    samples of the dataset it forms. A terminal gets the first files of an archive, and is told what other
    objects are whose bytes are no text.

    \b
    mesh head -c 100 s3://logs/today.txt
    mesh head s3://photos/train/
    mesh head s3://photos/shards/ --field image=jpg --field label=cls
    mesh head s3://photos/train/ --filter 'label == "cat" and size > 10000'
    mesh head s3://corpus/v1/ --kind lines --field text=jsonl --filter 'text.lang == "en"'
    mesh head s3://imagenet/records/ --kind tfrecord
    """
    with session.make_client() as client:
        if not url.is_folder and not fields and condition is None and kind == "auto":
            data = _beginning(client, url, count)
            if data is not None:
                if sys.stdout.isatty() and _is_binary(data):
                    _describe_object(session, client, url)
                else:
                    sys.stdout.buffer.write(data)
                return
        from meshsdk.open_dataset import open as open_dataset

        with session.steps("head", 3 if condition is None else 4) as done:
            client.transport.on_progress = done.reached
            ds = open_dataset(str(url), parse_fields(fields) if fields else None, kind=kind, client=client)
            done(f"{len(ds)} samples pinned")
            ds = filtered_dataset(ds, condition, done)
            schema = ds.schema()
            done("first sample prepared")
            rows = ds.head(samples)
            done("samples to show prepared")
        _show_dataset(session, ds, schema, rows)


def _beginning(client: Client, url: Remote, count: int) -> bytes | None:
    """Return the first bytes of an object, or None if there is no object with this key but some below it,
    as for a dataset's URL. Raises NotFoundError."""
    try:
        return client.get(url.bucket, url.key, length=count) if count else b""
    except NotFoundError as error:
        if error.code != "NoSuchKey" or not next(client.pages(url.bucket, f"{url.key}/", page=1)).entries:
            raise
    except ServerError as error:
        if error.status != _NO_SUCH_RANGE:
            raise
        return b""  # it is empty
    return None


def _is_binary(data: bytes) -> bool:
    """Return whether the first bytes of an object are no text for a terminal."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return True
    return any(character < " " and character not in "\t\n\r\f" for character in text)


def _describe_object(session: Session, client: Client, url: Remote) -> None:
    """Show what an object is, the first files of an archive, and which commands show more."""
    info = client.head(url.bucket, url.key)
    record = {"type": "object", "url": str(url), "size": info.size, "content_type": info.content_type}
    if archive_kind(url.key) is not None:
        with suppress(ServerError):  # it cannot be read as an archive, or not by this store
            page = client.member_page(url.bucket, url.key, page=_FILES)
            lines = [f"{url}: an archive ({page.kind}) of {page.count} files, {format_size(info.size)}"]
            lines += [f"{format_size(entry.size):>10}  {entry.name}" for entry in page.entries]
            lines += [f"all files: mesh archive ls {url}", f"samples: mesh head {url} --field NAME=EXT"]
            session.show("\n".join(lines), **record, kind=page.kind, files=page.count)
            return
    folder = Remote(url.bucket, url.key[: url.key.rfind("/") + 1])
    lines = [f"{url}: {info.content_type or 'an object'}, {format_size(info.size)}; its bytes are no text"]
    lines += [f"to a file: mesh cp {url} FILE", f"samples: mesh head {folder} --kind KIND"]
    session.show("\n".join(lines), **record)


_FILES = 10  # of an archive that are shown
_NO_SUCH_RANGE = 416


def filtered_dataset(ds: Dataset, condition: str | None, done: Steps) -> Dataset:
    """Return the samples for which `--filter` is true, if it is given; counts as one step."""
    if condition is None:
        return ds
    found = ds.filter(condition)
    done(f"{found.snapshot.samples} samples match")
    return found


def parse_fields(texts: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=SPEC` options into a `fields=` argument."""
    fields = {}
    for text in texts:
        name, equals, spec = text.partition("=")
        if not equals or not name or not spec:
            raise ConfigurationError(
                f"--field {text}: write NAME=EXT, such as image=jpg;jpeg, or label=@class"
            )
        fields[name] = spec
    return fields


def _show_dataset(
    session: Session, ds: Dataset, schema: Mapping[str, FieldSchema], rows: Sequence[Mapping[str, Any]]
) -> None:
    snapshot = ds.snapshot
    kinds = {name: str(field) for name, field in schema.items()}
    cut = f" in {snapshot.shards} shards" if snapshot.shards > 1 else ""
    lines = [
        f"{snapshot.source}: {len(ds)} samples{cut}, {format_size(snapshot.bytes)}, "
        f"{snapshot.skipped} skipped",
        f"snapshot {snapshot.hash}",
    ]
    for name, kind in kinds.items():
        classes = snapshot.fields[name].classes if name in snapshot.fields else ()
        count = f", {len(classes)} class{'es' * (len(classes) > 1)}: " if classes else ""
        lines.append(f"  {name}: {kind}{count}{', '.join(classes[:8])}")
    session.show(
        "\n".join(lines),
        type="dataset",
        source=snapshot.source,
        snapshot=snapshot.hash,
        samples=len(ds),
        bytes=snapshot.bytes,
        skipped=snapshot.skipped,
        fields=kinds,
    )
    for index, sample in enumerate(rows):
        shown = {name: describe_value(value) for name, value in sample.items()}
        text = ", ".join(f"{name}: {value}" for name, value in shown.items())
        session.show(f"  [{index}] {text}", type="sample", index=index, fields=shown)


def describe_value(value: Any) -> str:
    """Describe a field's value in a few words: numbers as they are, text by its beginning, arrays by dtype
    and shape."""
    if isinstance(value, np.ndarray) and value.ndim:
        text = _text(value)
        return f"{value.dtype} {list(value.shape)}{f' {text!r}' if text else ''}"
    return str(value)


def _text(value: np.ndarray[Any, Any]) -> str:
    """Return the beginning of bytes that are text, else an empty string."""
    if value.dtype != np.uint8 or value.ndim != 1:
        return ""
    text = value[: 4 * _SHOWN].tobytes().decode(errors="replace")[:_SHOWN]
    return text if text.replace("\n", " ").replace("\t", " ").isprintable() and "\ufffd" not in text else ""
