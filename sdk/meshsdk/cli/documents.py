"""`mesh plans` and `mesh snapshots`: stored plans and snapshots, and when they expire.

Law: shows what the server reports; a removal names one document by its hash.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from meshsdk.admin.documents import list_documents, remove_document, show_document
from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import shared_options
from meshsdk.client.native_api import fetch_snapshot
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.admin.documents import Kind, StoredDocument
    from meshsdk.cli.command_base import Session
    from meshsdk.client.s3_client import Client
    from meshwire.dataset.snapshot_diff import ListedObject

_HASH = re.compile(r"[0-9a-f]{64}")
_SHOWN = 20
_SHORT = re.compile(r"[0-9a-f]{6,63}")


@click.group("plans")
def plans() -> None:
    """Show and remove stored plans: a batch address is valid as long as its plan exists.

    A plan that a view or a job refers to is kept. Any other expires when it has not been used for 90 days
    (--keep-documents of the nodes); created again from the same content, it has the same hash, and its
    addresses work again.
    """


@click.group("snapshots")
def snapshots() -> None:
    """Show and remove stored snapshots: the pinned content of a source.

    A snapshot that a plan, a view or a job refers to is kept. Any other expires when it has not been used
    for 90 days (--keep-documents of the nodes). It cannot be created again once its source has changed.
    """


_NONE: dict[Kind, str] = {
    "plans": "no plans yet: a loader creates one when it starts, and so does `mesh view create --batches`",
    "snapshots": "no snapshots yet: opening a dataset pins one (mesh.open, mesh prefetch, mesh shard)",
}


def _list(session: Session, kind: Kind) -> None:
    with session.make_client() as client:
        listed = list(list_documents(client.transport, kind))
    if not listed:
        session.tell(_NONE[kind])
    for found in listed:
        named = f"  kept by {_some(found)}" if found.kept_by else ""
        session.show(
            f"{found.hash[:16]}  {format_size(found.bytes):>10}  used {_day(found.used_ms)}  "
            f"{_until(found)}  {_of(kind, found)}{named}",
            **found.told,
        )


def _show(session: Session, kind: Kind, name: str) -> None:
    with session.make_client() as client:
        found = show_document(client.transport, kind, whole_hash(client, kind, name))
    session.show("\n".join(_describe(kind, found)), **found.told)


def _describe(kind: Kind, found: StoredDocument) -> list[str]:
    return [
        f"{kind[:-1]} {found.hash}",
        f"  {'source' if kind == 'snapshots' else 'snapshot'}  {found.made_of}",
        f"  buckets  {', '.join(found.buckets)}",
        f"  {format_size(found.bytes)} on {found.nodes} node{'' if found.nodes == 1 else 's'}",
        f"  used last  {_day(found.used_ms)}",
        f"  {_until(found)}",
        *[f"  kept by  {name}" for name in found.kept_by],
    ]


def _remove(session: Session, kind: Kind, name: str, *, force: bool) -> None:
    with session.make_client() as client:
        digest = whole_hash(client, kind, name)
        silent = remove_document(client.transport, kind, digest, force=force)
    later = f"; {', '.join(silent)} will follow on return" if silent else ""
    session.show(f"removed {kind[:-1]} {digest}{later}", removed=digest, kind=kind[:-1], silent=list(silent))


def whole_hash(client: Client, kind: Kind, name: str) -> str:
    """Expand the prefix of a hash. Raises ConfigurationError."""
    if _HASH.fullmatch(name):
        return name
    if not _SHORT.fullmatch(name):
        raise ConfigurationError(f"{name!r}: expected a hash, or its first 6 digits or more")
    found = [kept.hash for kept in list_documents(client.transport, kind) if kept.hash.startswith(name)]
    if len(found) != 1:
        what = f"no {kind[:-1]} begins" if not found else f"{len(found)} {kind} begin"
        raise ConfigurationError(f"{what} with {name}; list them with: mesh {kind} ls")
    return found[0]


def _of(kind: Kind, found: StoredDocument) -> str:
    return found.made_of if kind == "snapshots" else f"{found.buckets[0]} of {found.made_of[:16]}"


def _some(found: StoredDocument) -> str:
    more = len(found.kept_by) - 2
    named = (name if len(name) < 40 else f"{name[:24]}…" for name in found.kept_by[:2])
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _until(found: StoredDocument) -> str:
    return "stays          " if found.expires_ms is None else f"goes {_day(found.expires_ms)}"


def _day(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d")


_force = click.option("--force", is_flag=True, help="Remove it even if it was used within the last day.")


@plans.command("ls")
@shared_options
def list_plans(session: Session) -> None:
    """List plans: size, last use, expiry, and what keeps them.

    \b
    mesh plans ls
    """
    _list(session, "plans")


@plans.command("show")
@click.argument("name", metavar="HASH")
@shared_options
def show_plan(session: Session, name: str) -> None:
    """Show one plan, by its hash or the first digits of it.

    \b
    mesh plans show 3f9c01d2
    """
    _show(session, "plans", name)


@plans.command("rm")
@click.argument("name", metavar="HASH")
@_force
@shared_options
def remove_plan(session: Session, name: str, force: bool) -> None:
    """Remove a plan on every node.

    A plan that a view or a job refers to cannot be removed. Created again from the same content, it has the
    same hash.

    \b
    mesh plans ls
    mesh plans rm 3f9c01d2
    """
    _remove(session, "plans", name, force=force)


@snapshots.command("ls")
@shared_options
def list_snapshots(session: Session) -> None:
    """List snapshots: size, last use, expiry, and what keeps them.

    \b
    mesh snapshots ls
    """
    _list(session, "snapshots")


@snapshots.command("show")
@click.argument("name", metavar="HASH")
@shared_options
def show_snapshot(session: Session, name: str) -> None:
    """Show one snapshot, by its hash or the first digits of it.

    Also shows the pages that it consists of: samples, bytes, hash, object; with --json all of them.

    \b
    mesh snapshots show 3f9c01d2
    """
    from meshwire.dataset.snapshot_diff import listed_objects

    with session.make_client() as client:
        found = show_document(client.transport, "snapshots", whole_hash(client, "snapshots", name))
        listed = listed_objects(fetch_snapshot(client.transport, found.hash))
    paged = listed[0].page is not None
    lines = [*_describe("snapshots", found), f"  {len(listed)} {'pages' if paged else 'objects, no pages'}"]
    lines += [f"    {_page(each)}" for each in listed[:_SHOWN]]
    if len(listed) > _SHOWN:
        lines.append(f"    and {len(listed) - _SHOWN} more; --json shows all")
    pages = [each.document() for each in listed]
    session.show("\n".join(lines), **{**found.told, "pages" if paged else "objects": pages})


@snapshots.command("diff")
@click.argument("before", metavar="HASH")
@click.argument("after", metavar="HASH")
@shared_options
def diff_snapshots(session: Session, before: str, after: str) -> None:
    """Show what changed from one snapshot to another.

    Lists the objects that were added (+), removed (-) and replaced (~), with their pages.

    \b
    mesh snapshots diff 3f9c01d2 77ab90e1
    """
    from meshwire.dataset import snapshot_diff

    with session.make_client() as client:
        hashes = [whole_hash(client, "snapshots", name) for name in (before, after)]
        sides = [fetch_snapshot(client.transport, digest) for digest in hashes]
    found = snapshot_diff.diff_snapshots(*sides)
    lines = [f"+ {_page(each)}" for each in found.added] + [f"- {_page(each)}" for each in found.removed]
    lines += [f"~ {_page(new)}" for _, new in found.replaced]
    samples = sides[1].samples - sides[0].samples
    lines.append(
        f"{len(found.added)} added, {len(found.removed)} removed, {len(found.replaced)} replaced, "
        f"{found.same} the same; {samples:+,} samples"
    )
    session.show(
        "\n".join(lines),
        before=hashes[0],
        after=hashes[1],
        added=[each.document() for each in found.added],
        removed=[each.document() for each in found.removed],
        replaced=[[old.document(), new.document()] for old, new in found.replaced],
        same=found.same,
        samples=samples,
    )


def _page(listed: ListedObject) -> str:
    named = f"etag {listed.etag}" if listed.page is None else f"page {listed.page[:16]}"
    counted = "" if listed.samples is None else f"{listed.samples:>12,} samples  "
    return f"{counted}{format_size(listed.bytes):>10}  {named}  {listed.url}"


@snapshots.command("rm")
@click.argument("name", metavar="HASH")
@_force
@shared_options
def remove_snapshot(session: Session, name: str, force: bool) -> None:
    """Remove a snapshot on every node.

    A snapshot that a plan, a view or a job refers to cannot be removed. Once its source has changed, it
    cannot be created again.

    \b
    mesh snapshots ls
    mesh snapshots rm 3f9c01d2
    """
    _remove(session, "snapshots", name, force=force)
