"""The `meshd` command: `serve`, `dev`, `admin`, `fsck`, `doctor`, `inspect`.

A command parses, calls and prints; there is no other logic here. Commands are imported on first use, so
`meshd --help` is quick and `serve` sets the environment before anything heavy is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import click

from meshd.errors import MeshdError
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = {
    "serve": ("meshd.cli.serve", "serve", "Run a storage node."),
    "dev": ("meshd.cli.dev", "dev", "Run a mesh of several nodes on this machine, to try it."),
    "admin": ("meshd.cli.admin", "admin", "Manage users, keys and policies; temporary credentials."),
    "fsck": ("meshd.cli.fsck", "fsck", "Verify a data directory, or rebuild its index."),
    "doctor": ("meshd.cli.doctor", "doctor", "Check the disks and file systems for weak durability."),
    "inspect": ("meshd.cli.inspect_store", "inspect", "Show a record, a data file, or statistics."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command. Raises NoSuchCommand with similar commands."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(error.command_name, possibilities=_COMMANDS, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardmesh", prog_name="meshd")
def meshd() -> None:
    """The daemon of a Shardmesh storage node: S3, storage, and the CPU work of training input.

    \b
    Try it:  meshd serve --data-dir ./data     (or three nodes:  meshd dev --nodes 3)
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (failure) or 2 (usage error)."""
    try:
        meshd.main(args=arguments, prog_name="meshd")
    except Exception as error:
        if (message := open_files_message(error)) is None and not isinstance(error, MeshdError):
            raise
        click.echo(f"meshd: {message or error}", err=True)
        raise SystemExit(1) from None
