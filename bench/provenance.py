"""The report's words on when, where and with what each row was taken.

Law: they come from the row's own file, so a row keeps its machine when others are measured elsewhere.
"""

from __future__ import annotations

from string import ascii_uppercase
from typing import TYPE_CHECKING

from bench import accelerators, epochs, machine
from bench.tables import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.results import RowResult

ONE_READING = (*accelerators.NAMES, epochs.NAME, "memory")
"""Rows that are taken once, however many rounds were asked for."""
LOST = "†"
COMMANDS = """<!-- not run: takes about an hour -->
```bash
make bench                                  # everything; about an hour, ten minutes more at first
.venv/bin/python -m bench --list            # the rows: how long each takes, what it needs
.venv/bin/python -m bench --only get-10k,put-10k --rounds 4    # renews these rows here; the others stay
.venv/bin/python -m bench --quick           # toy sizes, minutes; the figures mean nothing
.venv/bin/python -m bench --report          # writes this page again from the kept figures
```

The raw figures of every round are in `bench/figures/`, one file per row."""


def machines(rows: Mapping[str, RowResult]) -> dict[str, str]:
    """A letter for each machine, by its sentence."""
    said = dict.fromkeys(machine.sentence(row.machine) for row in rows.values() if row.machine)
    return dict(zip(said, ascii_uppercase, strict=False))


def taken(rows: Mapping[str, RowResult], names: Iterable[str]) -> list[str]:
    """Of a section's rows: which was taken when, at which commit, in how many rounds, and on which machine
    where there are several."""
    letters = machines(rows)
    groups: dict[str, list[str]] = {}
    notes = []
    for name in (name for name in names if name in rows):
        row = rows[name]
        groups.setdefault(_words(row, letters), []).append(name)
        if row.note:
            notes.append(f"{name}: {row.note}")
    if not groups:
        return []
    said = "; ".join(f"{', '.join(found)} {words}" for words, found in groups.items())
    return [" ".join([f"*Taken: {said}.*", *notes])]


def _words(row: RowResult, letters: Mapping[str, str]) -> str:
    rounds = int(row.setup.get("rounds", 0))
    parts = [f"on {row.taken.partition('T')[0]} at commit {row.commit}"]
    if len(letters) > 1 and row.machine:
        parts.append(f"machine {letters[machine.sentence(row.machine)]}")
    if rounds and row.name not in ONE_READING:
        parts.append(f"{rounds} {'round' if rounds == 1 else 'rounds'}")
    return ", ".join(parts) + (LOST if row.recovered else "")


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """Machines and versions, how carefully, how again."""
    lines = []
    letters = machines(rows)
    for said, letter in letters.items():
        here = [row for row in rows.values() if row.machine and machine.sentence(row.machine) == said]
        name = f"**Machine {letter}**: " if len(letters) > 1 else ""
        indent = "  " if name else ""
        lines += [f"- {name}{said}", *(f"{indent}- {line}" for line in _versions(here))]
    lines += [f"- {line}" for line in (*_busy(rows), *_lost(rows))]
    return ["## Machine, versions, commands", *(["\n".join(lines)] if lines else []), COMMANDS]


def _versions(rows: Sequence[RowResult]) -> list[str]:
    """A line for each group of programs; two versions where rows were taken with two."""
    groups: dict[str, dict[str, dict[str, None]]] = {}
    for row in rows:
        for group, found in row.versions.items():
            for package, version in found.items():
                groups.setdefault(group, {}).setdefault(package, {})[version] = None
    lines = []
    for group, packages in groups.items():
        said = (f"{package} {' and '.join(found)}" for package, found in packages.items())
        lines.append(f"{group}: {', '.join(said)}")
    return lines


def _busy(rows: Mapping[str, RowResult]) -> list[str]:
    seen = [float(row.setup["busy"]) for row in rows.values() if "busy" in row.setup]
    if not seen:
        return []
    span = f"{number(min(seen), 0)} to {number(max(seen), 0)} %"
    return [f"Other work on the machine: {span} of the cores when {len(seen)} of {len(rows)} rows began"]


def _lost(rows: Mapping[str, RowResult]) -> list[str]:
    """What the mark of recovered rows means."""
    return [f"{LOST} {said}" for said in dict.fromkeys(row.recovered for row in rows.values()) if said]
