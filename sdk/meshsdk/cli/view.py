"""`mesh view`: creates, lists, shows, materializes and removes views.

Law: a job of the node materializes a view; existing objects with the same content are left alone, so an
interrupted command can be run again.
"""

from __future__ import annotations

import json
import mimetypes
import re
from typing import IO, TYPE_CHECKING, Any

import click

from meshsdk.admin import jobs, views
from meshsdk.byte_sizes import format_size
from meshsdk.cli import view_options
from meshsdk.cli.command_base import EXIT_FAILED, json_or_text, shared_options
from meshsdk.cli.jobs import detach_option, follow_job, report_started
from meshsdk.cli.path_arguments import RemoteType
from meshsdk.cli.view_options import SampleChoices, sample_options, sample_view, shard_options
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.admin.views import ViewInfo
    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Remote
    from meshsdk.cli.view_options import ShardChoices


@click.command()
@click.argument("name", metavar="BUCKET--NAME")
@click.argument("target", type=RemoteType())
@click.option("--prefix", default="", help="Only keys of the view with this prefix.")
@detach_option
@shared_options
def materialize(session: Session, name: str, target: Remote, prefix: str, detach: bool) -> int:
    """Write a view's objects under TARGET. Running it again writes what is missing or has changed.

    The node does the work, whether or not this command waits for it: see `mesh job`.

    \b
    mesh view materialize photos--shards s3://photos-shards/v1/
    """
    with session.make_client() as client:
        begun = jobs.start_job(client.transport, jobs.materialize_job(name, str(target), prefix))
        if detach:
            return report_started(session, begun)
        found = follow_job(session, client, begun)
    if found.state != "done":
        click.echo(f"mesh: {found.state}: {found.error}", err=True)
    progress = found.progress
    session.show(
        f"{progress.written} written, {progress.there} unchanged, {found.failed} failed; "
        f"{format_size(progress.bytes)} in total",
        view=name,
        target=str(target),
        made=progress.written,
        there=progress.there,
        failed=found.failed,
        bytes=progress.bytes,
        job=found.id,
        state=found.state,
    )
    return 0 if found.state == "done" and not found.failed else EXIT_FAILED


SEPARATOR = "--"


@click.group("view")
def view() -> None:
    """Manage buckets computed from another bucket's objects on demand, readable by any S3 client.

    A view is named BUCKET--NAME. Its content follows its source; it is read-only.
    """


@view.command()
@click.argument("name", metavar="BUCKET--NAME")
@click.option("--op", "ops", multiple=True, metavar="'NAME KEY=VALUE …'", help="An op; repeatable, in order.")
@click.option(
    "--match", multiple=True, metavar=".EXT", help="Only keys with this ending; repeatable.  [every key]"
)
@click.option("--suffix", default="", metavar=".EXT", help="Replaces the ending that matched.")
@click.option("--prefix", default="", metavar="PREFIX", help="Only keys with this prefix.")
@click.option("--content-type", metavar="TYPE", help="Type of the results.  [by --suffix]")
@shard_options
@click.option("--shuffle", type=int, metavar="SEED", help="Shuffle shards or batches with this seed.")
@click.option("--spec", type=click.File("rb"), metavar="FILE", help="The complete document as JSON instead.")
@sample_options
@shared_options
def create(
    session: Session,
    name: str,
    ops: Sequence[str],
    match: Sequence[str],
    suffix: str,
    prefix: str,
    content_type: str | None,
    shards: ShardChoices,
    shuffle: int | None,
    spec: IO[bytes] | None,
    **samples: Any,
) -> None:
    """Create a view; repeating the command changes nothing.

    \b
    mesh view create photos--small --match .jpg --suffix .webp \\
        --op decode --op 'resize size=256' --op 'encode format=webp quality=80'
    mesh view create photos--shards --shards 1000 --split train=0.9 --split val=0.1
    mesh view create photos--classes --tfrecord --feature cls=int64 --group 'number(cls)'
    mesh view create photos--train224 --batches 256 --world 8 --epochs 90 --shuffle 7 --prefix train/ \\
        --field 'image=jpg' --field label=@class --op decode --op 'random_resized_crop size=224'
    mesh view create photos--array --zarr --prefix train/ --op decode --op 'resize size=[224,224]'
    mesh view create photos--small --spec small.json

    EXPR is an expression over a sample: key, stem, ext, size (bytes), files, modified (ms), sizes.EXT, and
    the content of its small files by their extension: 'number(cls)', 'json.width > 640'. See
    docs/expressions.md.
    """
    bucket, short = _split(name)
    choices = SampleChoices(**samples)
    if spec is not None:
        if choices.meant:
            raise ConfigurationError("give --spec, or --batches or --zarr, not both")
        document = _read_spec(spec, ops)
    elif choices.meant:
        if match or suffix or shards.meant:
            raise ConfigurationError("--batches and --zarr take samples by --field and --prefix")
        with session.make_client() as client:
            parsed = [parse_op(text) for text in ops]
            document = sample_view(client, bucket, prefix, parsed, choices, shuffle)
    elif shards.meant or shuffle is not None:
        if ops or suffix:
            raise ConfigurationError("shards contain unmodified objects; leave out --op and --suffix")
        document = shards.document(match, prefix, shuffle)
    else:
        parsed = [parse_op(text) for text in ops]
        guessed = mimetypes.guess_type(f"x{suffix}")[0] or "application/octet-stream"
        document = views.transform_view(
            parsed, match=match, suffix=suffix, prefix=prefix, content_type=content_type or guessed
        )
    with session.make_client() as client:
        made = views.create_view(client.transport, bucket, short, document)
    _show(session, made, f"created {made.name}: read s3://{made.name}/")


view.add_command(materialize)


@view.command("ls")
@click.argument("bucket", default="")
@shared_options
def list_all(session: Session, bucket: str) -> None:
    """List your views, or those of BUCKET.

    \b
    mesh view ls
    mesh view ls photos
    """
    with session.make_client() as client:
        listed = views.list_views(client.transport, bucket)
    if not listed:
        session.tell("no views yet: `mesh view create --help` shows how to create one")
    for found in listed:
        _show(session, found, f"{found.name:40} {found.kind:10} {_summary(found)}")


@view.command()
@click.argument("name", metavar="BUCKET--NAME")
@shared_options
def show(session: Session, name: str) -> None:
    """Print a view's document, in the form of `create --spec FILE`.

    \b
    mesh view show photos--small > small.json
    """
    with session.make_client() as client:
        found = views.show_view(client.transport, name)
    _show(session, found, json.dumps(found.view, indent=2, ensure_ascii=False))


@view.command()
@click.argument("name", metavar="BUCKET--NAME")
@shared_options
def rm(session: Session, name: str) -> None:
    """Remove a view. Its source is not affected.

    \b
    mesh view rm photos--small
    """
    with session.make_client() as client:
        views.show_view(client.transport, name)  # prevents removing a bucket that is not a view by mistake
        client.delete_bucket(name)
    session.show(f"removed {name}", action="remove", view=name)


_ARGUMENT = re.compile(r"\s+([A-Za-z_]\w*)=")


def parse_op(text: str) -> dict[str, Any]:
    """Parse `resize size=[256, 320]` → {"op": "resize", "args": {"size": [256, 320]}}. A value is JSON,
    else text; `resize@1` selects that version.

    Raises ConfigurationError.
    """
    name, *rest = _ARGUMENT.split(text.strip())
    if not name or any(mark in name for mark in " ="):
        raise ConfigurationError(f"--op {text!r}: expected NAME KEY=VALUE …, such as 'resize size=256'")
    pairs = zip(rest[::2], rest[1::2], strict=True)
    op, _, version = name.partition("@")
    found: dict[str, Any] = {"op": op, "args": {key: json_or_text(value) for key, value in pairs}}
    return found | {"version": version} if version else found


def _split(name: str) -> tuple[str, str]:
    bucket, separator, short = name.rpartition(SEPARATOR)
    if not separator or not bucket or not short:
        raise ConfigurationError(f"{name!r} is not a view name; expected BUCKET--NAME, such as photos--small")
    return bucket, short


def _read_spec(spec: IO[bytes], ops: Sequence[str]) -> dict[str, Any]:
    if ops:
        raise ConfigurationError("give --spec or --op, not both")
    try:
        document = json.load(spec)
    except ValueError as error:
        raise ConfigurationError(f"{spec.name} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{spec.name} must contain a JSON object")
    return document


def _summary(found: ViewInfo) -> str:
    view = found.view
    if found.kind == "batches":
        cut = f" for {view['world']} ranks" if view.get("world", 1) != 1 else ""
        epochs = "1 epoch" if view.get("epochs") == 1 else f"{view.get('epochs')} epochs"
        return f"{view.get('batch')} rows{cut}, {epochs} of {str(view.get('plan'))[:12]}"
    if found.kind == "zarr":
        return f"{', '.join(view.get('fields', ()))}; {view.get('chunk')} samples per chunk"
    if found.kind == "shards":
        return view_options.shards_summary(view)
    return " → ".join(str(op["op"]) for op in found.view.get("ops", ()))


def _show(session: Session, found: ViewInfo, text: str) -> None:
    session.show(text, name=found.name, bucket=found.bucket, kind=found.kind, view=dict(found.view))
