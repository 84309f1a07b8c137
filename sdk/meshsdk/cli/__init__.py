"""The `mesh` command: the SDK for people and scripts.

Law: commands parse, call the SDK and print; pure functions decide what to copy or delete before anything
happens.
Invariant: results go to stdout, progress and errors to stderr; the exit code reports the outcome.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from meshsdk.cli.command_base import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    exit_code,
    report_error,
    shared_options,
)
from meshsdk.cli.command_index import Chapters
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session

EPILOG = """\b
Examples:
  mesh mb s3://photos
  mesh cp -r ./photos s3://photos/train    upload a folder
  mesh ls s3://photos/train/               look into one
  mesh head s3://photos/train/             what a dataset of it would hold
  mesh preflight s3://photos/train/ --op decode:image   whether a job with it would work
  mesh doctor -- python train.py           what a training job waits for, and what to do
\b
Every command has examples of its own: mesh view create --help
Connects to MESH_ENDPOINT (or AWS_ENDPOINT_URL) with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,
over https with the authorities of MESH_CA_BUNDLE (or AWS_CA_BUNDLE), else the system's.
Exit codes: 0 done, 1 refused or failed, 2 wrong usage or configuration, 3 not there, 130 interrupted.
Completion by Tab, in bash: eval "$(_MESH_COMPLETE=bash_source mesh)"  (zsh_source, fish_source)"""


@click.group(cls=Chapters, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardmesh", prog_name="mesh")
@shared_options
def mesh(session: Session) -> None:
    """Lists, copies, reads and measures what a Shardmesh store (or any S3 store) holds."""
    del session  # its options are inherited by the commands


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
        report_error(error, as_json="--json" in arguments)
        return exit_code(error)
    except BrokenPipeError:  # `mesh ls | head` has read enough
        sys.stderr.close()
        return 0
    except OSError as error:
        click.echo(f"mesh: {error}", err=True)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0
