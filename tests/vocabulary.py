"""The check of names and words that `make check` runs: `python -m tests.vocabulary` prints what it finds.

It fails on retired words (docs/glossary.md has the words that replaced them) in names, comments, messages and
pages, on modules that are named with a gerund and are not on the short list below, and on objects that show
themselves under another name than that of their class.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[1]
RETIRED: Final = {
    "steward": "coordinator process",
    "mover": "rebalancer",
    "carrier": "rebalance worker",
    "decider": "primary",
    "grave": "tombstone",
    "bury": "add a tombstone",
    "porter": "acceptor",
    "errand": "the thing that is sent",
    "kitchen": "build context",
    "borrower": "peer cache client",
    "bringer": "write-back router",
    "doer": "fetch worker",
    "crew": "worker shards",
    "chore": "periodic task",
    "shelf": "cache store",
    "keeper": "cache manager",
    "homing": "placement, migration",
    "housing": "placement",
    "guardian": "failure detector",
    "dispel": "confirm",
    "whoever": "the client, the node, the user",
    "anew": "again",
}
"""Word → the word that replaced it. Plurals in -s are retired too."""
GERUNDS: Final = frozenset(
    {
        "framing",
        "lightning",  # the library that the adapter is for
        "listing",
        "packing",
        "routing",
        "scheduling",
        "timing",
        "tracing",  # as the field says: OpenTelemetry's word for all of it
        "training",
        "tuning",
        "warning",
        "encoding",
        "mapping",
        "forwarding",
        "paging",
        "sniffing",
    }
)
"""Last words of module names that the field says so."""
CHECKED: Final = ("*.py", "*.md", "*.yaml", "*.json", "*.toml")
SEARCHED: Final = (
    "meshd/",
    "sdk/",
    "operator/",
    "tools/",
    "helm/",
    "bench/",
    "examples/",
    "docs/",
    "README.md",
)
EXCEPT: Final = {
    "docs/metrics.md": "names the earlier values of a label",
    "bench/figures/": "figures as they were measured",
    "meshd/telemetry/legacy_names.py": "the earlier names of metrics",
    "helm/shardmesh/dashboards/shardmesh-nodes.json": "leaves out the earlier values of a label",
    "meshd/store/index/": "the name of a table in the index on disk",
    "meshd/store/replica/inventory.py": "a name in messages between nodes",
    "meshd/cluster/failure_detector.py": "the name of a lease in the control store",
}
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Finding(NamedTuple):
    """A word at a place: `path:line`."""

    place: str
    word: str
    better: str

    def __str__(self) -> str:
        return f"{self.place}: {self.word!r}: {self.better}"


def retired_words(path: str, text: str) -> Iterator[Finding]:
    """Yield retired words of a file, also as part of a name."""
    lowered = text.lower()
    if not any(word in lowered for word in RETIRED):  # sooner told than all words are looked up
        return
    for number, line in enumerate(text.splitlines(), 1):
        for found in _WORDS.findall(line):
            word = found.lower()
            stem = word.removesuffix("s")
            if better := RETIRED.get(word) or RETIRED.get(stem):
                yield Finding(f"{path}:{number}", word, f"use {better}")


def gerund_module(path: str) -> Finding | None:
    """Return a finding if the file is a module that is named with a gerund."""
    name = Path(path).stem
    last = name.rpartition("_")[2]
    if not path.endswith(".py") or not last.endswith("ing") or GERUNDS & {name, last}:
        return None
    return Finding(path, name, "name the module for the thing that it holds")


def other_class_names(path: str, text: str) -> Iterator[Finding]:
    """Yield each `__repr__` that begins with `<Name` where the class has another name."""
    lines = text.splitlines()
    for node in _classes(ast.parse(text)) if "__repr__" in text else ():
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__repr__":
                shown = re.search(r"<([A-Z_]\w*)", "\n".join(lines[method.lineno - 1 : method.end_lineno]))
                if shown and shown[1].strip("_") != node.name.strip("_"):
                    yield Finding(f"{path}:{method.lineno}", shown[1], f"show the class as <{node.name} …>")


def _classes(node: ast.AST) -> Iterator[ast.ClassDef]:
    """Yield the classes in it; expressions, of which most of a module consists, have none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield child
        if not isinstance(child, ast.expr):
            yield from _classes(child)


def findings() -> list[Finding]:
    """Return all findings in the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *CHECKED], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    found: list[Finding] = []
    for path in listed.stdout.splitlines():
        if not path.startswith(SEARCHED) or not (ROOT / path).is_file():
            continue
        if (module := gerund_module(path)) is not None:
            found.append(module)
        if path.endswith(".py"):
            found += other_class_names(path, (ROOT / path).read_text())
        if not path.startswith(tuple(EXCEPT)):
            found += retired_words(path, (ROOT / path).read_text())
    return found


if __name__ == "__main__":
    _found = findings()
    print(*_found, sep="\n", end="\n" if _found else "")
    sys.exit(f"{len(_found)} names or words that do not fit; see docs/glossary.md" if _found else 0)
