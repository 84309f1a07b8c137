"""`python -m tests.scale`: what one node costs when there is a great deal of one thing.

Law: a real daemon and ordinary signed requests; every figure is printed with its unit, and an answer that is
wrong ends the run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from tests.scale.counts import Counts
from tests.scale.scenes import SCENES
from tests.scale.table import Table


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("scenes", nargs=-1, type=click.Choice(sorted(SCENES)))
@click.option("--quick", is_flag=True, help="A thousandth of everything: shows that it runs.")
@click.option("--scratch", type=click.Path(path_type=Path), help="A folder with room for the data.")
def main(scenes: tuple[str, ...], quick: bool, scratch: Path | None) -> None:
    """Measure a node with very many keys, buckets, parts, versions or demanding clients.

    Without SCENES all of them: about half an hour and 5 GB of disk. Prints one Markdown row a figure, as
    docs/faults.md shows them.

    Example:  python -m tests.scale keys versions
    """
    counts = Counts.quick() if quick else Counts()
    table = Table(sys.stdout)
    for name in scenes or tuple(SCENES):
        with tempfile.TemporaryDirectory(prefix=f"scale-{name}-", dir=scratch) as folder:
            SCENES[name](Path(folder), counts, table)


if __name__ == "__main__":
    main()
