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
from meshsdk.cli.path_arguments import RemoteType
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from meshsdk.admin.jobs import JobInfo
    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Remote
    from meshsdk.client.s3_client import Client


@click.group("job")
def job() -> None:
    """Show, follow and stop jobs on the nodes, or start one.

    A job runs on the node even if this command ends; after a crash, it continues where it stopped. Starting
    the same job twice gives one job; starting it again later writes only what is missing or has changed.
    """


@job.group("start")
def start() -> None:
    """Start a job: shard, reshard, extract."""


def _layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--count", type=click.IntRange(1), metavar="N", help="Samples per shard.  [1000]"),
        click.option(
            "--size",
            type=click.IntRange(1024),
            metavar="BYTES",
            help="Approximate bytes per shard, instead of --count.",
        ),
        click.option("--shuffle", type=int, metavar="SEED", help="Shuffle samples with this seed."),
        click.option(
            "--split", multiple=True, metavar="NAME=SHARE", help="Parts, one folder each; repeatable."
        ),
        click.option(
            "--match", multiple=True, metavar=".EXT", help="Only files with this ending; repeatable."
        ),
        click.option(
            "--sort",
            metavar="EXPR",
            help="Sort samples by an expression, such as '-size' or 'part(key, \"/\", 1)'.",
        ),
        click.option(
            "--where", metavar="EXPR", help="Only samples for which it is true, such as 'size > 10000'."
        ),
        click.option("--group", metavar="EXPR", help="One folder per value."),
        click.option("--split-by", metavar="EXPR", help="Samples with the same value are in the same part."),
        click.option(
            "--format",
            type=click.Choice(["tar", "tgz", "tar.zst", "zip"]),
            help="Format of the shards.  [tar]",
        ),
        click.option("--name", help="Name of shards before their number.  [shard]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


detach_option = click.option(
    "-d", "--detach", is_flag=True, help="Print the job's id and exit; the job keeps running."
)
_names = click.option(
    "--names",
    type=click.Choice(["keep", "archive"]),
    help="Keep the names of files, or put them below a folder named after their archive.  [keep]",
)
_on_bad = click.option(
    "--on-bad", type=click.Choice(["fail", "skip"]), help="What to do with an unreadable archive.  [fail]"
)


@click.command()
@click.argument("source", type=RemoteType())
@click.argument("target", type=RemoteType())
@_layout_options
@detach_option
@shared_options
def shard(session: Session, source: Remote, target: Remote, detach: bool, **options: Any) -> int:
    """Pack objects of SOURCE into shards in TARGET, on the node.

    Files whose names differ only in the extension are a sample, and stay together.

    \b
    mesh shard s3://photos/train/ s3://photos-shards/v1/ --count 1000 --shuffle 7
    mesh shard s3://photos/ s3://photos-shards/v2/ --size 268435456 --split train=0.9 --split val=0.1
    mesh shard s3://photos/ s3://photos-shards/v3/ --sort -size --where 'ext == "jpg"'
    """
    return run_job(
        session, jobs.shard_job(str(source), str(target), **_given_options(options)), detach=detach
    )


@click.command()
@click.argument("source", type=RemoteType())
@click.argument("target", type=RemoteType())
@_layout_options
@_names
@_on_bad
@detach_option
@shared_options
def reshard(session: Session, source: Remote, target: Remote, detach: bool, **options: Any) -> int:
    """Repack archives of SOURCE into shards in TARGET, on the node.

    \b
    mesh reshard s3://photos-shards/v1/ s3://photos-shards/v2/ --count 5000 --shuffle 1
    mesh reshard s3://web/crawl.tar s3://web-shards/ --size 1073741824 --match .jpg --match .json
    """
    return run_job(
        session, jobs.reshard_job(str(source), str(target), **_given_options(options)), detach=detach
    )


@click.command()
@click.argument("source", type=RemoteType())
@click.argument("target", type=RemoteType())
@click.option("--match", multiple=True, metavar=".EXT", help="Only files with this ending; repeatable.")
@_names
@_on_bad
@detach_option
@shared_options
def extract(session: Session, source: Remote, target: Remote, detach: bool, **options: Any) -> int:
    """Unpack archives of SOURCE into objects in TARGET, on the node.

    \b
    mesh extract s3://photos-shards/v1/ s3://photos-again/
    mesh extract s3://uploads/album.zip s3://photos/album/ --match .jpg
    """
    return run_job(
        session, jobs.extract_job(str(source), str(target), **_given_options(options)), detach=detach
    )


for command in (shard, reshard, extract):
    start.add_command(command)


@job.command("ls")
@shared_options
def list_all(session: Session) -> None:
    """List your jobs, newest first.

    \b
    mesh job ls
    mesh job ls --json | jq -r 'select(.state == "running") | .id'
    """
    with session.make_client() as client:
        listed = jobs.list_jobs(client.transport)
    if not listed:
        session.tell(
            "no jobs yet: mesh shard, reshard, extract, prefetch, warm, relayout, view materialize start one"
        )
    for found in listed:
        since = datetime.fromtimestamp(found.created_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
        where = f"{_source(found)} → {_target(found)}"
        _show(session, found, f"{found.id}  {found.state:10} {found.kind:11} {since}  {where}")


@job.command()
@click.argument("job_id", metavar="ID")
@shared_options
def show(session: Session, job_id: str) -> None:
    """Show a job's progress, and what it could not read.

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
    """Follow a job to its end. Interrupting the command does not stop the job.

    \b
    mesh job watch 3f2a9c0117b4de52
    """
    with session.make_client() as client:
        return _report_ended(session, follow_job(session, client, jobs.show_job(client.transport, job_id)))


@job.command()
@click.argument("job_id", metavar="ID")
@shared_options
def cancel(session: Session, job_id: str) -> None:
    """Stop a job. What it has written stays; started again, it continues from there.

    \b
    mesh job cancel 3f2a9c0117b4de52
    """
    show_stopped(session, job_id)


def show_stopped(session: Session, job_id: str, *, pause: bool = False) -> None:
    """Stop a job, and show its progress."""
    with session.make_client() as client:
        found = (jobs.pause_job if pause else jobs.cancel_job)(client.transport, job_id)
        if not found.ended:
            found = jobs.show_job(client.transport, job_id, wait=10)
    _show(session, found, f"{found.id} {found.state}: {_summary(found)}")


# --- starting and following -----------------------------------------------------------------------------


def _given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, in the form of the job document."""
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
        raise ConfigurationError(f"--split {text!r}: expected NAME=SHARE, such as train=0.9") from None


def run_job(session: Session, document: dict[str, Any], *, detach: bool) -> int:
    """Start a job and, unless detached, follow it to its end; return the exit code."""
    with session.make_client() as client:
        return run_job_with(session, client, document, detach=detach)


def run_job_with(session: Session, client: Client, document: dict[str, Any], *, detach: bool) -> int:
    """Start a job and, unless detached, follow it to its end; return the exit code."""
    begun = jobs.start_job(client.transport, document)
    return (
        report_started(session, begun)
        if detach
        else _report_ended(session, follow_job(session, client, begun))
    )


def report_started(session: Session, begun: JobInfo) -> int:
    """Report the job that the command leaves running, and return the exit code."""
    _show(session, begun, f"{begun.id} {begun.state}; follow it with: mesh job watch {begun.id}")
    return 0


def _report_ended(session: Session, found: JobInfo) -> int:
    _show(session, found, f"{found.id} {found.state}: {_summary(found)}")
    return 0 if found.state == "done" else EXIT_FAILED


def follow_job(session: Session, client: Client, begun: JobInfo) -> JobInfo:
    """Follow a job to its end with a progress bar, and report on stderr what it skipped."""
    found = begun
    try:
        for state in _with_bar(session, jobs.watch_job(client.transport, begun.id)):
            found = state
    except KeyboardInterrupt:
        click.echo(
            f"mesh: the job continues; follow it with `mesh job watch {begun.id}`, stop it with "
            f"`mesh job cancel {begun.id}`",
            err=True,
        )
        raise
    for name, why in found.failures:
        click.echo(f"mesh: skipped {name}: {why}", err=True)
    return found


def _with_bar(session: Session, states: Iterator[JobInfo]) -> Iterator[JobInfo]:
    """Yield the states unchanged, showing them on stderr if that is a terminal."""
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
    if found.report:
        return "\n".join(_report_lines(found))
    progress = found.progress
    parts = [f"{progress.written} written", f"{progress.there} unchanged"]
    parts += [f"{progress.removed} from earlier runs removed"] if progress.removed else []
    parts += [f"{found.failed} skipped"] if found.failed else []
    return f"{', '.join(parts)}; {format_size(progress.bytes)} in total"


def _source(found: JobInfo) -> str:
    """Return what a job reads."""
    plan = found.spec.get("plan")
    source = found.spec.get("source") or ""
    if found.kind != "warm" or not plan:
        return str(source)
    return f"{source} by plan {plan[:12]}".strip()


def _target(found: JobInfo) -> str:
    return str(found.spec.get("target", "the same disks" if found.kind == "relayout" else "the cache"))


def _report_lines(found: JobInfo) -> Sequence[str]:
    """Return what a job of a kind with a report has done."""
    return relayout_lines(found) if found.kind == "relayout" else _warm_up_lines(found)


def _warm_up_lines(found: JobInfo) -> Sequence[str]:
    """Return what a warm-up has done: one line, and one for each reason why a sample is not kept."""
    report, progress = found.report, found.progress
    kept = report["stored"] + report["there"]
    lines = [
        f"{kept} of {progress.samples} samples kept ({report['there']} of them before): of "
        f"{format_size(progress.bytes)} of source data, {format_size(report['bytes'])} were stored, in "
        f"{report['cpu_seconds']:.1f} CPU seconds"
    ]
    lines += [f"  {count} not kept: {why}" for why, count in _by_count(report["left_out"])]
    lines += [f"  {count} broken: {why}" for why, count in _by_count(report["bad"])]
    lines += [f"  nothing on {node}: {why}" for node, why in sorted(report["refused"].items())]
    return lines


def _by_count(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(reasons.items(), key=lambda item: (-item[1], item[0]))


def _lines(found: JobInfo) -> Sequence[str]:
    progress = found.progress
    lines = [
        f"{found.id}  {found.kind}  {found.state}" + (f" (run {found.run})" if found.run > 1 else ""),
        f"from     {_source(found)}",
        f"to       {_target(found)}",
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
    lines += _report_lines(found) if found.report else ()
    lines += [f"skipped  {name}: {why}" for name, why in found.failures]
    return lines


def _show(session: Session, found: JobInfo, text: str) -> None:
    session.show(text, **asdict(found))


def relayout_lines(found: JobInfo) -> Sequence[str]:
    """Return what a relayout costs and gains, or has done."""
    report, measured = found.report, bool(found.spec.get("dry_run"))
    lines = [f"  {node}: {why}" for node, why in sorted(report["refused"].items())]
    left = sorted(report["left_out"].items(), key=lambda item: (-item[1], item[0]))
    lines += [f"  {count:,} left where they are: {why}" for why, count in left]
    if not report["objects"]:
        return ["nothing to put in order", *lines]
    where = ", ".join(report["nodes"])
    lines.insert(0, f"{report['objects']:,} objects, {format_size(report['bytes'])}, on the disks of {where}")
    lines.append(f"  an epoch in order of key costs   {_cost(report['before'])}")
    if not report["to_move"]:
        return [*lines, "  they lie in order"]
    lines.append(f"  in order it would cost           {_cost(report['expected'])}")
    if report["after"] is not None:
        lines.append(f"  measured after it, it costs      {_cost(report['after'])}")
    size, count = format_size(report["to_move_bytes"]), report["to_move"]
    if measured:
        copies = report["objects"] / max(1, report["before"].get("objects", 0))
        each = sum(report[name].get("disk_seconds", 0.0) for name in ("before", "expected"))
        seconds = 2 * each * copies
        lines.append(
            f"  to move: {count:,} objects, {size}, which take {seconds:,.0f} s or more, at half of the "
            "disks' time, and that much free space for some minutes"
        )
    else:
        moved = format_size(report["moved_bytes"])
        lines.append(f"  moved: {report['moved']:,} of {count:,} objects, {moved} of {size}")
    return lines


def _cost(cost: Mapping[str, float]) -> str:
    seeks, seconds, media = (cost.get(name, 0.0) for name in ("seeks", "disk_seconds", "media_seconds"))
    share = seeks / max(1, cost.get("objects", 0))
    return f"{seeks:,.0f} seeks ({share:.2g} an object), {seconds:.1f} s of disk for {media:.1f} s of bytes"
