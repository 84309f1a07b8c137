"""`mesh tokenize`: stores the tokens of a corpus once, as token files.

Law: the nodes tokenise; started again, the command continues after the last finished file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meshsdk import ops
from meshsdk.byte_sizes import parse_size
from meshsdk.cli.cat import KIND_OPTION, parse_fields
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.path_arguments import RemoteType
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Remote
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.open_dataset import Kind


@click.command()
@click.argument("source", type=RemoteType())
@click.argument("destination", type=RemoteType())
@click.option(
    "--tokenizer", required=True, metavar="URL", help="A tokenizer.json, such as s3://models/t.json."
)
@click.option("--field", "fields", multiple=True, help="NAME=EXT of the text [default: guessed].")
@KIND_OPTION
@click.option(
    "--text", "text_path", metavar="PATH", help="Where the text is in a JSON document, such as text."
)
@click.option("--end-of-text", metavar="TOKEN", help="Put this token after each text.")
@click.option("--no-special", is_flag=True, help="Do not add the tokenizer's special tokens.")
@click.option("--shard-tokens", default="64Mi", metavar="SIZE", help="Tokens of a file, at least.  [64Mi]")
@click.option("--skip-bad", is_flag=True, help="Leave out files that are not text, and count them.")
@shared_options
def tokenize(
    session: Session,
    source: Remote,
    destination: Remote,
    tokenizer: str,
    fields: Sequence[str],
    kind: Kind,
    text_path: str | None,
    end_of_text: str | None,
    no_special: bool,
    shard_tokens: str,
    skip_bad: bool,
) -> None:
    """Tokenize a corpus once and store the tokens under DESTINATION, for
    `mesh.open(DESTINATION, kind="tokens")`.

    The files have Megatron's format (NAME.bin and NAME.idx), with uint16 for vocabularies up to 65,536, else
    int32. The nodes do the work. An interrupted run continues when it is started again.

    \b
    mesh tokenize s3://corpus/v1 s3://corpus/tokens --kind lines --text text --tokenizer s3://models/gpt2.json
    mesh tokenize s3://books/txt s3://books/tokens --field text=txt --tokenizer s3://models/gpt2.json \\
        --end-of-text '<|endoftext|>'
    """
    from meshsdk.open_dataset import open as open_dataset
    from meshsdk.token_writer import write_tokens

    size = max(1, parse_size(shard_tokens, "--shard-tokens"))
    with session.make_client() as client:
        found = open_dataset(str(source), parse_fields(fields) if fields else None, kind=kind, client=client)
        texts = _text_field(found)
        (name,) = texts.fields
        steps = [] if text_path is None else [ops.json(name, text_path)]
        ds = texts.map(*steps, ops.tokenize(name, tokenizer, special=not no_special, end_of_text=end_of_text))
        with session.steps("tokenize", len(ds)) as done:
            reached = [0]

            def show(samples: int, tokens: int) -> None:
                done(f"{tokens:,} tokens", samples - reached[0])
                reached[0] = samples

            made = write_tokens(ds, str(destination), shard_tokens=size, skip_bad=skip_bad, on_batch=show)
    left_out = f", {made.bad} bad samples left out" if made.bad else ""
    session.show(
        f"{made.tokens:,} tokens of {made.dtype} in {made.sequences:,} sequences{left_out}, "
        f"{len(made.shards)} files in {destination}",
        tokens=made.tokens,
        sequences=made.sequences,
        bad=made.bad,
        files=len(made.shards),
        dtype=made.dtype,
    )


def _text_field(dataset: Dataset) -> Dataset:
    """Return the dataset with its only field of bytes. Raises ConfigurationError."""
    names = [name for name, info in dataset.snapshot.fields.items() if info.kind == "bytes"]
    if len(names) != 1:
        raise ConfigurationError(
            f"the source has the fields {', '.join(names)}: name the one with the text, as --field text=txt"
        )
    return dataset.select(names[0])
