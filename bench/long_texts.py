"""The row of long texts: packed rows of a few documents of 2,000,000 characters, beside as many short ones.

Law: the same words in both, through the same daemon and ops. Invariant: contenders take turns
(`bench.interleave`); both are measured before the first round, as a job does once.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.ready_process import StandingContender, measure_in_turn
from bench.tables import BARS_HEAD, number, table, verdict
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bench.results import Figure, RowResult
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "long-texts"
LONG, SHORT = "long documents", "short documents"
CONTENDERS: Final = (LONG, SHORT)
FOLDERS: Final[Mapping[str, tuple[str, int]]] = {LONG: ("long", 2_000_000), SHORT: ("short", 2_000)}
"""Folder and characters a document."""
LEAST: Final = 0.5
BUCKET, TOKENIZER = "texts", "tokenizer.json"
LENGTH, BATCH, WORDS = 512, 64, 8192
_CHARACTERS: Final = 6
"""Of a word with its space."""
TEXT: Final = f"""\
Documents of words of five letters, tokenised (a token a word) and packed into rows of {LENGTH:,} tokens, with
`shuffle=True`; a batch is {BATCH} rows. The same words as documents of 2,000,000 and of 2,000 characters. The
node has measured both, as before the first step of a job; every round is another order."""


def title(scale: Scale) -> str:
    return f"Long texts, packed, {_tokens(scale) / 1e6:.0f} million tokens"


def _tokens(scale: Scale) -> int:
    return scale.tokens // 4


def measure(server: Server, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Fill, start a process for each contender, then rounds in turn."""
    say(f"{NAME}: filling")
    _fill(server, _tokens(scale))
    seconds, pid = str(scale.reading), str(server.child.process.pid)

    def start(name: str) -> StandingContender:
        words = ["bench.long_text_reader", FOLDERS[name][0], server.endpoint, seconds, pid]
        return StandingContender(name, words, server)

    yield from measure_in_turn(NAME, CONTENDERS, start, scale.rounds, say)


def _fill(server: Server, tokens: int) -> None:
    assert server.account is not None
    account, random = server.account, np.random.default_rng(7)
    words = np.array([f"{number:05d}".translate(_LETTERS) for number in range(WORDS)])
    vocabulary = {word: number + 1 for number, word in enumerate(words.tolist())} | {"?": 0}
    tokenizer: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }  # fmt: skip
    text = " ".join(words[random.integers(0, WORDS, tokens)].tolist())
    with connect(
        server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
    ) as client:
        client.create_bucket(BUCKET)
        client.put(BUCKET, TOKENIZER, json.dumps(tokenizer).encode())
        for folder, characters in FOLDERS.values():
            each = characters // _CHARACTERS * _CHARACTERS  # of whole words
            for at in range(0, len(text), each):
                client.put(BUCKET, f"{folder}/{at:012d}.txt", text[at : at + each].encode())


_LETTERS: Final = str.maketrans("0123456789", "abcdefghij")


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """The row in the report."""
    result = rows.get(NAME)
    if result is None or not result.contenders():
        return []
    names = result.contenders()
    lines = [
        ["tokens a second", *(number(result.value(name, "rate"), 0) for name in names)],
        ["client CPU µs a token", *(number(result.value(name, "client_us"), 3) for name in names)],
        ["server CPU µs a token", *(number(result.value(name, "server_us"), 3) for name in names)],
    ]
    ratio = result.ratio(LONG, SHORT, "rate")
    bars = [[f"{LONG} ÷ {SHORT}", number(ratio, 2, "×"), verdict(ratio, LEAST)]]
    return [f"## {result.title}", TEXT, table(["", *names], lines), table(BARS_HEAD, bars)]
