"""`mesh demo`: the main job on one node, in a process of its own.

The demonstration is the package `meshdemo`, which uses the daemon and the SDK as anybody would.
"""

from __future__ import annotations

import os
import sys

import click


@click.command()
@click.option("--quick", is_flag=True, help="Toy size: less than half a minute.")
@click.option("--stay", is_flag=True, help="Keep the daemon and its web console running until Ctrl-C.")
def demo(quick: bool, stay: bool) -> None:
    """Try Shardmesh on one node: store, preprocess, train, resume, share.

    Starts a daemon in a temporary directory, uploads handwritten digits and photographs over S3, trains a
    small network on the batches that the daemon prepares, and checks every claim that it prints. Takes one to
    three minutes; Ctrl-C stops everything. Requires the daemon and torch:
    pip install 'shardmesh[server,torch]'.

    \b
    mesh demo
    mesh demo --quick
    mesh demo --stay
    """
    # Another program: threads of the libraries of this one must not take part in what is measured.
    flags = [flag for flag, given in (("--quick", quick), ("--stay", stay)) if given]
    os.execv(sys.executable, [sys.executable, "-m", "meshdemo", *flags])
