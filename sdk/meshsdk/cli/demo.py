"""`mesh demo`: the main job on one node, in a process of its own.

The demonstration is the package `meshdemo`, which uses the daemon and the SDK as anybody would.
"""

from __future__ import annotations

import os
import sys

import click


@click.command()
@click.option("--quick", is_flag=True, help="Toy size: less than half a minute.")
@click.option("--stay", is_flag=True, help="Keep the daemon and its web console up until Ctrl-C.")
def demo(quick: bool, stay: bool) -> None:
    """Show the main job on one node: store, preprocess, train, resume, share.

    It starts a daemon in a temporary directory, puts handwritten digits and photographs into it over S3,
    trains a small network from the batches that the daemon makes, and checks all that it claims. One to three
    minutes; Ctrl-C stops everything. It needs the daemon and torch: pip install 'shardmesh[server,torch]'.

    \b
    mesh demo
    mesh demo --quick
    mesh demo --stay
    """
    # Another program: threads of the libraries of this one must not take part in what is measured.
    flags = [flag for flag, given in (("--quick", quick), ("--stay", stay)) if given]
    os.execv(sys.executable, [sys.executable, "-m", "meshdemo", *flags])
