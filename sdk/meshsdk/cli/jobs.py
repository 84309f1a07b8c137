"""`mesh job`, `shard`, `reshard` and `extract`: work the node does on its own.

Law: starts, shows and stops jobs; no object passes through this process.
Invariant: an interrupted command leaves its job running and says how to return to it.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import jobs
from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import EXIT_FAILED, progress_bar, shared_options
from meshsdk.cli.locations import RemoteType
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from meshsdk.admin.jobs import JobInfo
    from meshsdk.cli.command_base import Session
    from meshsdk.cli.locations import Remote
    from meshsdk.client.s3_client import Client


@click.group("job")
def job() -> None:
    """Work on the node: objects into shards, shards into shards, archives into objects.

    A job runs on the node, whoever goes away; killed, it goes on where it was. The same job started twice is
    one job; started again later, it writes only what is missing or has changed.
    """


@job.group("start")
def start() -> None:
    """Starts a job: shard, reshard, extract."""


def _layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--count", type=click.IntRange(1), metavar="N", help="Samples a shard.  [1000]"),
        click.option(
            "--size", type=click.IntRange(1024), metavar="BYTES", help="Bytes a shard, about, instead."
        ),
        click.option("--shuffle", type=int, metavar="SEED", help="Samples in an order by this seed."),
        click.option("--split", multiple=True, metavar="NAME=SHARE", help="Parts, a folder each; repeat."),
        click.option("--match", multiple=True, metavar=".EXT", help="Only files that end so; repeat."),
        click.option(
            "--sort", metavar="EXPR", help="Samples by an expression, as '-size' or 'part(key, \"/\", 1)'."
        ),
        click.option("--where", metavar="EXPR", help="Only samples it holds for, as 'size > 10000'."),
        click.option("--group", metavar="EXPR", help="A folder for each of its values."),
        click.option("--split-by", metavar="EXPR", help="Samples of one value are in one part of the split."),
        click.option(
            "--format", type=click.Choice(["tar", "tgz", "tar.zst", "zip"]), help="Of the shards.  [tar]"
        ),
        click.option("--name", help="What shards are called before their number.  [shard]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


detach_option = click.option("-d", "--detach", is_flag=True, help="Print the job's id and leave it running.")
_names = click.option(
    "--names",
    type=click.Choice(["keep", "archive"]),
    help="Files keep their names, or go below a folder called as their archive.  [keep]",
)
_on_bad = click.option(
    "--on-bad", type=click.Choice(["fail", "skip"]), help="What an archive that cannot be read does.  [fail]"
)


@click.command()
@click.argument("source", type=RemoteType())
@click.argument("target", type=RemoteType())
@_layout_options
@detach_option
@shared_options
def shard(session: Session, source: Remote, target: Remote, detach: bool, **options: Any) -> int:
    """Makes objects shards: SOURCE to TARGET, on the node.

    Files whose names differ in their extension only are a sample, and stay together.

    \b
    mesh shard s3://photos/train/ s3://photos-shards/v1/ --count 1000 --shuffle 7
    mesh shard s3://photos/ s3://photos-shards/v2/ --size 268435456 --split train=0.9 --split val=0.1
    mesh shard s3://photos/ s3://photos-shards/v3/ --sort -size --where 'ext == "jpg"'
    """
    return run_job(session, jobs.shard_job(str(source), str(target), **_given(options)), detach=detach)


@click.command()
@click.argument("source", type=RemoteType())
@click.argument("target", type=RemoteType())
@_layout_options
@_names
@_on_bad
@detach_option
@shared_options
def reshard(session: Session, source: Remote, target: Remote, detach: bool, **options: Any) -> int:
    """Makes archives other shards: SOURCE to TARGET, on the node.

    \b
    mesh reshard s3://photos-shards/v1/ s3://photos-shards/v2/ --count 5000 --shuffle 1
    mesh reshard s3://web/crawl.tar s3://web-shards/ --size 1073741824 --match .jpg --match .json
    """
    return run_job(session, jobs.reshard_job(str(source), str(target), **_given(options)), detach=detach)


@click.command()
@click.argument("source", type=RemoteType())
@click.argument("target", type=RemoteType())
@click.option("--match", multiple=True, metavar=".EXT", help="Only files that end so; repeat.")
@_names
@_on_bad
@detach_option
@shared_options
def extract(session: Session, source: Remote, target: Remote, detach: bool, **options: Any) -> int:
    """Makes files in archives objects: SOURCE to TARGET, on the node.

    \b
    mesh extract s3://photos-shards/v1/ s3://photos-again/
    mesh extract s3://uploads/album.zip s3://photos/album/ --match .jpg
    """
    return run_job(session, jobs.extract_job(str(source), str(target), **_given(options)), detach=detach)


for command in (shard, reshard, extract):
    start.add_command(command)


@job.command("ls")
@shared_options
def list_all(session: Session) -> None:
    """Lists your jobs, the youngest first.

    \b
    mesh job ls
    mesh job ls --json | jq -r 'select(.state == "running") | .id'
    """
    with session.make_client() as client:
        listed = jobs.list_jobs(client.transport)
    if not listed:
        session.tell("no jobs yet: mesh shard, reshard, extract, prefetch and view materialize start one")
    for found in listed:
        since = datetime.fromtimestamp(found.created_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
        where = f"{found.spec.get('source')} → {found.spec.get('target', 'the cache')}"
        _show(session, found, f"{found.id}  {found.state:10} {found.kind:11} {since}  {where}")


@job.command()
@click.argument("job_id", metavar="ID")
@shared_options
def show(session: Session, job_id: str) -> None:
    """Shows how far a job has come, and what it could not read.

    \b
    mesh job show 3f2a9c0117b4de52
    """
    with session.make_client() as client:
        found = jobs.show_job(client.transport, job_id)
    _show(session, found, "\n".join(_lines(found)))


@job.command()
@click.argument("job_id", metavar="ID")
@shared_options
def watch(session: Session, job_id: str) -> int:
    """Follows a job to its end. Interrupting this does not stop the job.

    \b
    mesh job watch 3f2a9c0117b4de52
    """
    with session.make_client() as client:
        return _report_ended(session, follow_job(session, client, jobs.show_job(client.transport, job_id)))


@job.command()
@click.argument("job_id", metavar="ID")
@shared_options
def cancel(session: Session, job_id: str) -> None:
    """Stops a job. What it has written stays; started again, it goes on from there.

    \b
    mesh job cancel 3f2a9c0117b4de52
    """
    show_stopped(session, job_id)


def show_stopped(session: Session, job_id: str, *, pause: bool = False) -> None:
    """Stop a job, and say how far it came."""
    with session.make_client() as client:
        found = (jobs.pause_job if pause else jobs.cancel_job)(client.transport, job_id)
        if not found.ended:
            found = jobs.show_job(client.transport, job_id, wait=10)
    _show(session, found, f"{found.id} {found.state}: {_summary(found)}")


# --- starting and following -----------------------------------------------------------------------------


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options somebody gave, as the document has them."""
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if "split" in given:
        given["split"] = dict(map(_share, given["split"]))
    if "match" in given:
        given["match"] = list(given["match"])
    return given


def _share(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    try:
        return name, float(share if equals else "")
    except ValueError:
        raise ConfigurationError(f"--split {text!r}: expected NAME=SHARE, as train=0.9") from None


def run_job(session: Session, document: dict[str, Any], *, detach: bool) -> int:
    """Start a job and follow it to its end, or leave it; the exit code."""
    with session.make_client() as client:
        return _run(session, client, document, detach=detach)


def _run(session: Session, client: Client, document: dict[str, Any], *, detach: bool) -> int:
    """Start a job and follow it to its end; the exit code."""
    begun = jobs.start_job(client.transport, document)
    return (
        report_started(session, begun)
        if detach
        else _report_ended(session, follow_job(session, client, begun))
    )


def report_started(session: Session, begun: JobInfo) -> int:
    """The end of a command that leaves its job running."""
    _show(session, begun, f"{begun.id} {begun.state}; follow it with: mesh job watch {begun.id}")
    return 0


def _report_ended(session: Session, found: JobInfo) -> int:
    _show(session, found, f"{found.id} {found.state}: {_summary(found)}")
    return 0 if found.state == "done" else EXIT_FAILED


def follow_job(session: Session, client: Client, begun: JobInfo) -> JobInfo:
    """A job at its end, with a bar until then; what it skipped is told on stderr."""
    found = begun
    try:
        for state in _with_bar(session, jobs.watch_job(client.transport, begun.id)):
            found = state
    except KeyboardInterrupt:
        click.echo(
            f"mesh: the job goes on; see it with `mesh job watch {begun.id}`, stop it with "
            f"`mesh job cancel {begun.id}`",
            err=True,
        )
        raise
    for name, why in found.failures:
        click.echo(f"mesh: skipped {name}: {why}", err=True)
    return found


def _with_bar(session: Session, states: Iterator[JobInfo]) -> Iterator[JobInfo]:
    """The states as they come, drawn on stderr when that is a terminal."""
    if not session.has_bar:
        yield from states
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with progress_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("queued", total=None)
        for found in states:
            progress = found.progress
            text = f"{progress.phase or found.state} {progress.outputs}/{progress.outputs_total or '?'}"
            rate = f" {format_size(progress.rate)}/s" if progress.rate else ""
            bar.update(
                task, description=text + rate, completed=progress.bytes, total=progress.bytes_total or None
            )
            yield found


def _summary(found: JobInfo) -> str:
    if found.state == "failed":
        return found.error
    progress = found.progress
    parts = [f"{progress.written} written", f"{progress.there} were there"]
    parts += [f"{progress.removed} of earlier runs removed"] if progress.removed else []
    parts += [f"{found.failed} skipped"] if found.failed else []
    return f"{', '.join(parts)}; {format_size(progress.bytes)} in all"


def _lines(found: JobInfo) -> Sequence[str]:
    progress = found.progress
    lines = [
        f"{found.id}  {found.kind}  {found.state}" + (f" (run {found.run})" if found.run > 1 else ""),
        f"from     {found.spec.get('source')}",
        f"to       {found.spec.get('target', 'the cache')}",
        f"outputs  {progress.outputs} of {progress.outputs_total or '?'}",
        f"samples  {progress.samples} of {progress.samples_total or '?'}",
        f"bytes    {format_size(progress.bytes)} of {format_size(progress.bytes_total)}",
    ]
    if progress.rate:
        lines.append(f"rate     {format_size(progress.rate)}/s")
    if found.eta_s is not None:
        lines.append(f"left     {found.eta_s:.0f} s")
    if found.error:
        lines.append(f"error    {found.error}")
    lines += [f"skipped  {name}: {why}" for name, why in found.failures]
    return lines


def _show(session: Session, found: JobInfo, text: str) -> None:
    session.show(text, **asdict(found))
