"""`python -m tests.fuzz --minutes 10`: every target for its share of the time; findings stay in .fuzz/.

Guided by coverage where atheris is installed (`make fuzz` installs it where it has a wheel), else by mutation
of the corpus alone. The head of a request is also fuzzed on connections to a running daemon. Exits with 1
when something was found, and says which file to look at: a fix takes that file into tests/golden/corpora.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

from meshd.util.clock import SystemClock
from tests.fuzz import wire
from tests.fuzz.corpora import CORPORA, corpus, keep
from tests.fuzz.mutating import mutated
from tests.fuzz.targets import TARGETS
from tests.support.daemons import Daemon

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / ".fuzz"
WIRE = "wire"
_clock = SystemClock()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="for all targets together")
    parser.add_argument("--target", action="append", choices=[*TARGETS, WIRE])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    names = options.target or [*TARGETS, WIRE]
    seconds = max(2, int(options.minutes * 60 / len(names)))
    guided = importlib.util.find_spec("atheris") is not None
    print(f"seed {options.seed}, {seconds} s a target, {'coverage' if guided else 'mutation'}", flush=True)
    found = 0
    for name in names:
        if name == WIRE:
            found += _over_the_wire(options.seed, seconds)
        elif guided:
            found += _guided(name, options.seed, seconds)
        else:
            found += _by_mutation(name, options.seed, seconds)
    return 1 if found else 0


def _guided(name: str, seed: int, seconds: int) -> int:
    """libFuzzer in a process of its own; what covers more than the corpus stays in .fuzz/TARGET/corpus."""
    target, folder = TARGETS[name], FOUND / name
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    words = folder / "words"
    words.write_text("".join(f'"{_quoted(word)}"\n' for word in target.words))
    arguments = [f"-max_total_time={seconds}", f"-max_len={target.limit}", f"-seed={seed}", f"-dict={words}"]
    arguments += [f"-artifact_prefix={folder}/", "-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.guided",
        name,
        *arguments,
        str(folder / "corpus"),
        str(CORPORA / name),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), stderr=subprocess.PIPE, text=True, check=False
    )
    runs = [line for line in done.stderr.splitlines() if "number_of_executed_units" in line]
    print(f"{name}: {runs[-1].split()[-1] if runs else '?'} inputs", flush=True)
    if done.returncode:
        print(done.stderr[-3000:])
    return int(done.returncode != 0)


def _quoted(word: str) -> str:
    """A word as libFuzzer's dictionaries take it."""
    return "".join(
        f"\\x{byte:02x}" if byte < 32 or byte > 126 or byte in b'"\\' else chr(byte) for byte in word.encode()
    )


def _by_mutation(name: str, seed: int, seconds: int) -> int:
    source, target = random.Random(seed), TARGETS[name]
    inputs = [path.read_bytes() for path in corpus(name)]
    end, tried = _clock.monotonic() + seconds, 0
    while _clock.monotonic() < end:
        data = mutated(source, inputs, target.words, target.limit)
        tried += 1
        try:
            target.run(data)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}\n  kept as {keep(FOUND / name, data, 'crash')}")
            return 1
    print(f"{name}: {tried} inputs", flush=True)
    return 0


def _over_the_wire(seed: int, seconds: int) -> int:
    source, words = random.Random(seed), TARGETS["request"].words
    inputs = [path.read_bytes() for path in corpus(WIRE)]
    end, tried = _clock.monotonic() + seconds, 0
    with Daemon.start(args=["--head-timeout", "1"]) as daemon:
        while _clock.monotonic() < end:
            data = mutated(source, inputs, words, 4096)
            tried += 1
            try:
                wire.send(daemon, data)
                if tried % 50 == 0:
                    wire.alive(daemon)
            except Exception as error:
                print(
                    f"{WIRE}: {type(error).__name__}: {error}\n  kept as {keep(FOUND / WIRE, data, 'crash')}"
                )
                return 1
    print(f"{WIRE}: {tried} inputs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
