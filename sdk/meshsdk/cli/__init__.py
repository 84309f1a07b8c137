"""The `mesh` command: what a person or a script does with the store, on top of the SDK.

Law: commands parse, call the SDK and print; what is decided (what to copy, what to delete) is decided by
pure functions first. Invariant: results go to stdout, progress and errors to stderr; the exit code tells
how it went.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from meshsdk.cli.archives import archive
from meshsdk.cli.benching import bench
from meshsdk.cli.buckets import bucket
from meshsdk.cli.cache import cache
from meshsdk.cli.cluster import cluster
from meshsdk.cli.copying import cp
from meshsdk.cli.dividing import mix, split
from meshsdk.cli.doctor import doctor
from meshsdk.cli.inspecting import preflight, schema, stats
from meshsdk.cli.jobs import extract, job, reshard, shard
from meshsdk.cli.listing import ls, mb, rb, stat
from meshsdk.cli.ops import op
from meshsdk.cli.prefetching import prefetch
from meshsdk.cli.reading import cat, head
from meshsdk.cli.removing import rm
from meshsdk.cli.replaying import bad, replay
from meshsdk.cli.running import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, exit_code, report, shared_options
from meshsdk.cli.syncing import sync
from meshsdk.cli.top import top
from meshsdk.cli.viewing import view
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from meshsdk.cli.running import Session

EPILOG = """\b
Examples:
  mesh ls                                  the buckets
  mesh ls s3://photos/train/               one folder
  mesh cp -r ./photos s3://photos/train    upload a folder
  mesh sync --delete ./photos s3://photos/train
  mesh head s3://photos/train/             what a dataset of it would hold
  mesh preflight s3://photos/train/ --op decode:image   whether a job with it would work
  mesh split s3://photos/train/ --part train=0.9 --part val=0.1   named parts, pinned
  mesh mix s3://web/=0.7 s3://books/=0.3   what an epoch of both would hold
  mesh ls s3://photos/shard-000.tar/-/     the files of an archive: keys below ARCHIVE/-/
  mesh view create photos--small --match .jpg --op decode --op 'resize size=256' --op 'encode format=jpeg'
  mesh bucket create photos --origin s3://company-photos/train
  mesh prefetch s3://photos/train/         into the cache before it is read
  mesh op ls                               what nodes can do to a field
  mesh op push augment.py                  ops of your own, run on the nodes
  mesh shard s3://photos/train/ s3://photos-shards/v1/ --count 1000
  mesh job ls                              what the node works on
  mesh cluster status                      the nodes of a mesh, and what moves between them
  mesh bad ls PLAN                         what a plan could not prepare
  mesh replay PLAN 1093 --epoch 2          one position of it again
  mesh cache simulate --epochs 20 --capacity 0.3   which reads a cache would serve
  mesh doctor -- python train.py           what a training job waits for, and what to do
  mesh top                                 this machine, its jobs and the nodes, on one screen
  mesh bench s3://photos/train --op decode:image --op random_resized_crop:image:224
\b
Connects to MESH_ENDPOINT (or AWS_ENDPOINT_URL) with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,
over https with the authorities of MESH_CA_BUNDLE (or AWS_CA_BUNDLE), else the system's.
Exit codes: 0 done, 1 refused or failed, 2 wrong usage or configuration, 3 not there, 130 interrupted."""


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@shared_options
def mesh(session: Session) -> None:
    """Lists, copies, reads and measures what a Shardmesh store (or any S3 store) holds."""
    del session  # its options are inherited by the commands


for command in (
    ls,
    cp,
    sync,
    cat,
    head,
    schema,
    stats,
    preflight,
    split,
    mix,
    stat,
    rm,
    mb,
    rb,
    archive,
    bucket,
    prefetch,
    op,
    view,
    shard,
    reshard,
    extract,
    job,
    cluster,
    bench,
    doctor,
    top,
    cache,
    bad,
    replay,
):
    mesh.add_command(command)


def main() -> None:
    """Runs the command line and exits with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    try:
        result = mesh.main(arguments, prog_name="mesh", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except MeshError as error:
        report(error, as_json="--json" in arguments)
        return exit_code(error)
    except BrokenPipeError:  # `mesh ls | head` has read enough
        sys.stderr.close()
        return 0
    except OSError as error:
        click.echo(f"mesh: {error}", err=True)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0
