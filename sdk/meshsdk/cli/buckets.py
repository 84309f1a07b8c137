"""`mesh bucket`: buckets with an origin or a copy count: create, show, change.

Law: `meshwire.origin` defines a valid origin, and the node checks it. No secret passes through this
process.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import cluster_admin
from meshsdk.byte_sizes import format_size, parse_size
from meshsdk.cli.command_base import shared_options
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.admin.cluster_admin import BucketInfo
    from meshsdk.cli.command_base import Session


@click.group("bucket")
def bucket() -> None:
    """Manage buckets with an origin or a number of copies.

    An origin is a remote store behind a bucket (S3, Google or Azure storage, a web server, a folder): reads
    of it are cached on the nodes' disks, writes go to it. For any other bucket use `mesh mb` and `mesh ls`.
    Requires root's keys.
    """


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--credentials", metavar="NAME", help="A credentials file on the nodes, or anonymous."),
        click.option("--ttl", type=float, metavar="SECONDS", help="Revalidate after this time.  [60]"),
        click.option("--immutable/--mutable", default=None, help="Objects never change; never revalidate."),
        click.option(
            "--write",
            type=click.Choice(["through", "back", "off"]),
            help="How writes reach the origin.  [through]",
        ),
        click.option(
            "--quota", metavar="SIZE", help="Maximum cache size, such as 500GiB; 0 for no limit.  [0]"
        ),
        click.option("--pin", multiple=True, metavar="PREFIX", help="Keys that stay cached; repeatable."),
        click.option(
            "--home", multiple=True, metavar="NODE", help="A node that caches the bucket; repeatable."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


_copies = click.option(
    "--copies", type=click.IntRange(1, 8), help="Copies of each object.  [the mesh's default]"
)


@bucket.command()
@click.argument("name")
@click.option(
    "--origin",
    metavar="URL",
    help="s3://BUCKET/PREFIX, gs://, az://, https:// or file:///; without one, the mesh stores the bucket.",
)
@_copies
@click.option("--endpoint", metavar="URL", help="Address of an S3 service other than AWS.")
@click.option("--region", metavar="NAME", help="Region of the S3 bucket.  [us-east-1]")
@_options
@shared_options
def create(session: Session, name: str, origin: str | None, copies: int | None, **options: Any) -> None:
    """Create a bucket with an origin or a number of copies.

    \b
    mesh bucket create results --copies 3
    mesh bucket create photos --origin s3://company-photos/train --immutable
    mesh bucket create models --origin s3://models --endpoint http://10.0.0.7:8333 --credentials ceph
    mesh bucket create scans --origin file:///mnt/nas/scans --write off --quota 500GiB
    """
    document = _given_options(options)
    if origin is None and document:
        raise ConfigurationError(f"--{next(iter(document))} applies to an origin; give --origin URL as well")
    if origin is not None and copies is not None:
        raise ConfigurationError(
            "--copies does not apply to a bucket with an origin, which is cached once; give one of the two"
        )
    document |= {"url": origin} if origin else {"copies": copies} if copies else {}
    with session.make_client() as client:
        _show(session, cluster_admin.create_bucket(client.transport, name, document))


@bucket.command()
@click.argument("name")
@_copies
@_options
@click.option("--unpin", is_flag=True, help="Remove all pins.")
@click.option("--homeless", is_flag=True, help="Remove all homes: every storing node caches a share.")
@click.option(
    "--decoded-quota",
    metavar="SIZE",
    help="Maximum in each node's decoded cache, for any bucket; none for no limit.",
)
@shared_options
def change(
    session: Session,
    name: str,
    copies: int | None,
    unpin: bool,
    homeless: bool,
    decoded_quota: str | None,
    **options: Any,
) -> None:
    """Change how bucket NAME is cached or copied.

    Given pins and homes replace the previous ones. If --copies changes, copies are added or removed in the
    background; follow it with: mesh cluster status --watch

    \b
    mesh bucket change results --copies 2
    mesh bucket change photos --quota 2TiB --pin val/ --pin test/
    mesh bucket change photos --home gpu-7 --home gpu-8
    mesh bucket change scratch --decoded-quota 50GiB
    """
    document = _given_options(options)
    if unpin:
        document["pins"] = []
    if homeless:
        document["homes"] = []
    if copies is not None:
        if document:
            raise ConfigurationError(
                "--copies applies to buckets without an origin and cannot be combined with other options"
            )
        document = {"copies": copies}
    if decoded_quota is not None:
        none = decoded_quota == "none"
        document["decoded_quota"] = None if none else parse_size(decoded_quota, "--decoded-quota")
    if not document:
        raise ConfigurationError("nothing to change: give an option, such as --ttl 300 or --copies 3")
    with session.make_client() as client:
        _show(session, cluster_admin.change_bucket(client.transport, name, document))


@bucket.command()
@click.argument("name")
@shared_options
def show(session: Session, name: str) -> None:
    """Show the origin or the number of copies of NAME.

    \b
    mesh bucket show photos
    """
    with session.make_client() as client:
        _show(session, cluster_admin.show_bucket(client.transport, name))


@bucket.command("ls")
@shared_options
def list_all(session: Session) -> None:
    """List buckets with an origin or a number of copies.

    `mesh ls` lists all buckets.

    \b
    mesh bucket ls
    """
    with session.make_client() as client:
        listed = cluster_admin.list_buckets(client.transport)
    if not listed:
        session.tell("no bucket has an origin or its own number of copies; `mesh ls` lists all buckets")
    for found in listed:
        _show(session, found)


def _given_options(options: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    for one, several in (("pin", "pins"), ("home", "homes")):
        if one in given:
            given[several] = list(given.pop(one))
    if "quota" in given:
        given["quota"] = parse_size(given["quota"], "--quota")
    return given


def _show(session: Session, found: BucketInfo) -> None:
    origin, quota = found.origin, found.decoded_quota
    decoded = "" if quota is None else f", decoded cache at most {format_size(quota)} a node"
    if origin is None:
        copies = f"{found.copies} cop{'y' if found.copies == 1 else 'ies'}"
        if found.wanted != found.copies:
            copies += f", {found.wanted} wanted: mesh cluster status --watch"
        session.show(f"{found.name}  {copies}{decoded}", **asdict(found))
        return
    facts = [origin["url"]]
    facts += [f"at {origin['endpoint']}"] if origin.get("endpoint") else []
    facts += [f"credentials {origin['credentials']}"] if origin.get("credentials") else []
    facts.append(f"write {origin['write']}")
    facts.append("immutable" if origin["immutable"] else f"ttl {origin['ttl']:g} s")
    facts += [f"quota {format_size(origin['quota'])}"] if origin["quota"] else []
    facts += [f"pins {' '.join(origin['pins'])}"] if origin["pins"] else []
    facts += [f"homes {' '.join(origin['homes'])}"] if origin.get("homes") else []
    session.show(f"{found.name}  {', '.join(facts)}{decoded}", **asdict(found))
