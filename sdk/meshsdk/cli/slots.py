"""`mesh cluster slots`: splits the slots of the cluster map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meshsdk.admin import cluster_admin
from meshsdk.cli.command_base import shared_options

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session


@click.command()
@click.argument("count", type=click.IntRange(2, 1 << 20))
@shared_options
def slots(session: Session, count: int) -> None:
    """Split the slots of names until there are COUNT, a power of two.

    A mesh begins with 16384, which are enough for 1,000 nodes. With more nodes, some have far more than
    their share: take 16 or more for each node. The parts of a slot stay where it was; then a part of the
    data moves, as after a node has joined. The number cannot be lowered.

    \b
    mesh cluster slots 131072
    """
    with session.make_client() as client:
        done = cluster_admin.split_slots(client.transport, count)
    session.show(
        f"the mesh has {done['slots']:,} slots (map {done['version']}). "
        "Follow it: mesh cluster status --watch",
        **done,
    )
