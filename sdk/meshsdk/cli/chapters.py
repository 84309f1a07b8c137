"""What `mesh` can do, by subject: each command's module and the line that `mesh --help` has of it.

Law: a command is imported when it is asked for, so that each starts as quickly as it can. Invariant: a
command stands in one chapter, and has the name of the function that it is.
"""

from __future__ import annotations

import importlib

import click

CHAPTERS = {
    "Objects": {
        "ls": ("listing", "Buckets, or the keys that begin with a URL."),
        "stat": ("listing", "Size, ETag and metadata of an object; how much is in a folder."),
        "cat": ("reading", "Objects to standard output."),
        "head": ("reading", "First bytes of an object; of a folder, the dataset it would be."),
        "cp": ("copying", "Copy files up, objects down, or within the store."),
        "sync": ("syncing", "Make a folder like another one."),
        "rm": ("removing", "Delete objects."),
        "mb": ("listing", "Make a bucket."),
        "rb": ("listing", "Remove an empty bucket."),
        "archive": ("archives", "What is in a tar, tgz, tar.zst or zip, not downloaded."),
    },
    "Datasets": {
        "schema": ("inspecting", "Fields of a dataset's rows: dtype and shape."),
        "stats": ("inspecting", "Samples, bytes by field, samples by class and shard."),
        "preflight": ("inspecting", "Would a job with it work? If not, why, and what to do."),
        "split": ("dividing", "Cut into parts, such as train and val."),
        "mix": ("dividing", "What epochs of several datasets would hold."),
        "plan": ("keeping", "Plans that are kept: who needs them, when they go."),
        "snapshot": ("keeping", "Snapshots that are kept."),
        "bench": ("benching", "How fast its batches come."),
    },
    "Training jobs": {
        "doctor": ("doctor", "What a training job waits for, and the cheapest fix."),
        "top": ("top", "This machine, its jobs and the nodes on one screen."),
        "bad": ("replaying", "Samples that could not be prepared, and why."),
        "replay": ("replaying", "Prepare one position of an epoch again."),
    },
    "Work on the nodes": {
        "view": ("viewing", "Buckets made of another bucket's objects, on demand."),
        "op": ("ops", "What nodes can do to a field; ops of your own."),
        "shard": ("jobs", "Objects into shards."),
        "reshard": ("jobs", "Shards into other shards: shuffled, sorted, split."),
        "extract": ("jobs", "Archives into objects."),
        "job": ("jobs", "What the nodes work on: shown, followed, stopped."),
    },
    "The store": {
        "bucket": ("buckets", "Buckets that cache a remote store; numbers of copies."),
        "prefetch": ("prefetching", "Bring a remote store's objects into the cache."),
        "cache": ("cache", "How a cache would do, replayed on a trace of reads."),
        "cluster": ("cluster", "The nodes of a mesh: shown, drained, replaced."),
    },
}
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
        command = getattr(importlib.import_module(f"meshsdk.cli.{_MODULES[cmd_name]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises NoSuchCommand with what may have been meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(error.command_name, possibilities=_MODULES, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        width = max(map(len, _MODULES))
        for title, chapter in CHAPTERS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in chapter.items()])
