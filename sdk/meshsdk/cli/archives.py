"""`mesh archive`: what is in a tar, tgz, tar.zst or zip that is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meshsdk.cli.places import RemoteType
from meshsdk.cli.running import EXIT_MISSING, shared_options
from meshsdk.errors import ConfigurationError
from meshsdk.sizes import human
from meshwire.archives.kinds import ENDINGS, MARK, archive_kind

if TYPE_CHECKING:
    from meshsdk.cli.places import Remote
    from meshsdk.cli.running import Session


@click.group("archive")
def archive() -> None:
    """Archives (.tar, .tar.gz, .tgz, .tar.zst, .tzst, .zip): what is in them, without downloading them.

    The node indexes an archive when it comes in. Its files are also keys below ARCHIVE/-/, for every command
    and every other S3 client:

    \b
    mesh ls s3://shards/0001.tar/-/train/
    mesh cat s3://shards/0001.tar/-/train/cat.jpg > cat.jpg
    mesh cp -r s3://shards/0001.tgz/-/ ./unpacked
    aws s3 cp s3://shards/0001.zip/-/labels.json .
    """


@archive.command("ls")
@click.argument("url", type=RemoteType())
@click.option("--prefix", default="", help="Files whose names begin so.")
@shared_options
def list_files(session: Session, url: Remote, prefix: str) -> int:
    """Lists the files of an archive.

    Size, offset in the archive (- where they are compressed), name.

    \b
    mesh archive ls s3://shards/0001.tar
    mesh archive ls s3://shards/0001.zip --prefix train/ --json
    """
    _check(url)
    count = size = 0
    with session.client() as client:
        for entry in client.members(url.bucket, url.key, prefix):
            offset = "-" if entry.offset is None else str(entry.offset)
            session.show(
                f"{human(entry.size):>10}  {offset:>12}  {entry.name}",
                url=f"{url}{MARK}{entry.name}",
                name=entry.name,
                size=entry.size,
                offset=entry.offset,
                etag=entry.etag,
            )
            count += 1
            size += entry.size
    if not count and prefix:
        click.echo(f"mesh: no file of {url} begins with {prefix!r}", err=True)
        return EXIT_MISSING
    if not session.as_json:
        click.echo(f"{count} files, {human(size)}")
    return 0


@archive.command()
@click.argument("url", type=RemoteType())
@shared_options
def show(session: Session, url: Remote) -> None:
    """Tells kind and number of files, or why it cannot be read.

    \b
    mesh archive show s3://shards/0001.tgz
    """
    _check(url)
    with session.client() as client:
        found = client.member_page(url.bucket, url.key, page=1)
    record = {"kind": found.kind, "files": found.count, "size": found.size, "etag": found.etag}
    plain = bool(found.entries) and found.entries[0].offset is not None
    reads = "in place" if plain else "of an inflated copy, made when a file is first read"
    lines = [f"{url}", f"  kind   {found.kind}", f"  files  {found.count}", f"  size   {human(found.size)}"]
    if found.entries:
        lines.append(f"  read   {reads}")
    session.show("\n".join(lines), url=str(url), **record)


def _check(url: Remote) -> None:
    if archive_kind(url.key) is None:
        raise ConfigurationError(f"{url} is no archive by its name: one of {', '.join(ENDINGS)}")
