"""Commands of `mesh` by chapter: the module of each, and its line in `mesh --help`.

Law: a command's module is imported when the command runs, so every command starts fast. The commands of
`TOOLS` belong to the optional package `shardmesh-tools`, which registers them as entry points.
Invariant: a command is listed once, under the name of its function.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import click

from meshsdk.errors import ConfigurationError
from meshsdk.tools_package import COMMANDS, find_tool, missing_tool

TOOLS: Final = ""
"""Instead of a module: a command of `shardmesh-tools`."""
CHAPTERS = {
    "Objects": {
        "ls": ("objects", "List buckets, or the keys that begin with a URL."),
        "stat": ("objects", "Show an object's size, ETag and metadata, or a folder's total."),
        "cat": ("cat", "Write objects to standard output."),
        "head": ("cat", "Show an object's first bytes, or the dataset a folder forms."),
        "cp": ("cp", "Copy files up, objects down, or within the store."),
        "sync": ("sync", "Make one folder like another."),
        "rm": ("objects", "Delete objects."),
        "mb": ("objects", "Create a bucket."),
        "rb": ("objects", "Remove an empty bucket."),
        "archive": ("objects", "List a tar, tgz, tar.zst or zip without downloading it."),
    },
    "Datasets": {
        "schema": ("datasets", "Show dtype and shape of a dataset's fields."),
        "stats": ("datasets", "Count samples and bytes, by field, class and shard."),
        "preflight": ("datasets", "Check that training on a dataset would work."),
        "split": ("datasets", "Split a dataset into parts, such as train and val."),
        "mix": ("datasets", "Show what epochs of several mixed datasets contain."),
        "plans": ("documents", "Show and remove stored plans."),
        "snapshots": ("documents", "Show and remove stored snapshots."),
        "bench": ("bench", "Measure how fast a dataset's batches arrive."),
    },
    "Training jobs": {
        "doctor": (TOOLS, "Find what a training job waits for, and the cheapest fix."),
        "top": (TOOLS, "Show this machine, its jobs and the nodes on one screen."),
        "tune": (TOOLS, "Suggest changes to a running mesh, with their gain."),
        "bad": ("bad_samples", "Show samples that could not be prepared, and why."),
        "replay": ("bad_samples", "Prepare one position of an epoch again."),
    },
    "Work on the nodes": {
        "view": ("view", "Manage buckets computed from another bucket on demand."),
        "op": ("op", "Show the nodes' ops; push and test ops of your own."),
        "shard": ("jobs", "Pack objects into shards."),
        "reshard": ("jobs", "Repack shards: shuffled, sorted, split."),
        "extract": ("jobs", "Unpack archives into objects."),
        "tokenize": ("tokens", "Tokenize a corpus once, and store the tokens."),
        "warm": ("warm", "Decode a plan's samples once, before training."),
        "relayout": ("relayout", "Sort objects on rotational disks, for fast epochs."),
        "job": ("jobs", "Show, follow and stop jobs on the nodes."),
    },
    "Getting started": {
        "demo": ("demo", "Try it on one node: store, train, resume, share."),
    },
    "The store": {
        "bucket": ("buckets", "Manage buckets that cache a remote store, and copies."),
        "prefetch": ("prefetch", "Load a remote store's objects into the cache."),
        "cache": (TOOLS, "Simulate a cache on a trace of reads."),
        "cluster": ("cluster", "Show, drain and replace the nodes of a mesh."),
        "simulate": (TOOLS, "Simulate a mesh that does not exist yet."),
        "sizing": (TOOLS, "Estimate the hardware for a training job."),
    },
}
RENAMED = {"plan": "plans", "snapshot": "snapshots"}
"""Commands by their former name, which works for one release with a warning."""
_ADMIN = "meshd admin --help"
ALTERNATIVES = {
    "put": "mesh cp FILE s3://BUCKET/KEY",
    "upload": "mesh cp FILE s3://BUCKET/KEY",
    "get": "mesh cp s3://BUCKET/KEY FILE",
    "download": "mesh cp s3://BUCKET/KEY FILE",
    "mv": "mesh cp SOURCE TARGET, then mesh rm SOURCE",
    "du": "mesh stat s3://BUCKET/",
    "status": "mesh cluster status",
    "nodes": "mesh cluster status",
    "datasets": "mesh snapshots ls",
    "buckets": "mesh ls",
    "jobs": "mesh job ls",
    "ops": "mesh op ls",
    "views": "mesh view ls",
    **dict.fromkeys(("user", "users", "key", "keys", "role", "roles", "policy", "policies", "admin"), _ADMIN),
}
"""What to use instead of commands that users know from other programs."""
_MODULES = {name: module for chapter in CHAPTERS.values() for name, (module, _) in chapter.items()}


class Chapters(click.Group):
    """A group whose commands are those of `CHAPTERS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _MODULES:
            return None
        module = _MODULES[cmd_name]
        if module == TOOLS:
            command = find_tool(COMMANDS, cmd_name) or _missing_command(cmd_name)
        else:
            command = getattr(importlib.import_module(f"meshsdk.cli.{module}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command. Raises NoSuchCommand with suggestions."""
        if args and args[0] in RENAMED:
            old, new = args[0], RENAMED[args[0]]
            click.echo(
                f"mesh: `mesh {old}` is deprecated: use `mesh {new}`; in the next release `mesh {old}` has "
                "another meaning, or none",
                err=True,
            )
            args = [new, *args[1:]]
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            if instead := ALTERNATIVES.get(error.command_name):
                raise click.UsageError(
                    f"No such command {error.command_name!r}. Use: {instead}", ctx
                ) from None
            raise click.NoSuchCommand(error.command_name, possibilities=_MODULES, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        width = max(map(len, _MODULES))
        for title, chapter in CHAPTERS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in chapter.items()])


def _missing_command(name: str) -> click.Command:
    """Returns a command that accepts any arguments and raises ConfigurationError: how to install it."""

    def fail(**_: Any) -> None:
        raise ConfigurationError(missing_tool(f"mesh {name}"))

    return click.Command(
        name,
        callback=fail,
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
    )
