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
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    exit_code,
    report_error,
    shared_options,
)
from meshsdk.cli.command_index import Chapters
from meshsdk.errors import MeshError
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session

EPILOG = """\b
Examples:
  mesh mb s3://photos
  mesh cp -r ./photos s3://photos/train    upload a folder
  mesh ls s3://photos/train/               list it
  mesh head s3://photos/train/             show the dataset it forms
  mesh preflight s3://photos/train/ --op decode:image   check that training on it would work
  mesh doctor -- python train.py           find what slows a training job, and the fix
\b
Every command's help has examples: mesh view create --help
Connects to MESH_ENDPOINT (or AWS_ENDPOINT_URL) with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
Over https it trusts the CAs in MESH_CA_BUNDLE (or AWS_CA_BUNDLE), by default the system's.
Exit codes: 0 success, 1 failure, 2 usage or configuration error, 3 not found, 130 interrupted.
Tab completion in bash: eval "$(_MESH_COMPLETE=bash_source mesh)"  (zsh_source, fish_source)"""


@click.group(cls=Chapters, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardmesh", prog_name="mesh")
@shared_options
def mesh(session: Session) -> None:
    """List, copy, read and measure what a Shardmesh store (or any S3 store) holds."""
    del session  # the commands inherit its options


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        result = mesh.main(arguments, prog_name="mesh", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `mesh ls | head` has read enough
        sys.stderr.close()
        return 0
    except Exception as error:
        out_of_descriptors = open_files_message(error) is not None
        if isinstance(error, click.ClickException) and not out_of_descriptors:
            (_with_commands(error) if isinstance(error, click.NoSuchCommand) else error).show()
            return EXIT_USAGE
        if not isinstance(error, MeshError | OSError) and not out_of_descriptors:
            raise
        report_error(error, as_json="--json" in arguments)
        return exit_code(error)
    return result if isinstance(result, int) else 0


def _with_commands(error: click.NoSuchCommand) -> click.NoSuchCommand:
    """Add the commands of the group to the error, if something that is no command stands in the place of one,
    as in `mesh plans 4f1c09e2`."""
    context, name = error.ctx, error.command_name
    group = None if context is None else context.command
    if error.possibilities or context is None or not isinstance(group, click.Group) or group is mesh:
        return error
    names = group.list_commands(context)
    example = next((each for each in ("show", "ls") if each in names), None)
    hint = "" if example is None else f", such as `{context.command_path} {example} {name}`"
    message = f"{error.message} Write one of {', '.join(names)}{hint}"
    return click.NoSuchCommand(name, message, ctx=context)
