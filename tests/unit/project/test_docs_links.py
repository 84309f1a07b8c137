"""Links of the pages lead somewhere: the file is there, and has a heading of that name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "helm").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them of headings."""
    found: list[str] = []
    for title in re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.strip().lower())
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        same = sum(
            other == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", other) is not None for other in found
        )
        found.append(f"{slug}-{same}" if same else slug)
    return frozenset(found)


def broken(page: Path) -> list[str]:
    wrong = []
    for target in LINK.findall(prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        where = (page.parent / name).resolve() if name else page
        if not where.exists() or (anchor and where.suffix == ".md" and anchor not in anchors(where)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# A `b`, c\n[x](#a-b-c) [y](#nowhere) [z](none.md) [w](a.md#a-b-c)\n```\n[q](no.md)\n```\n"
    )
    assert broken(page) == ["#nowhere", "none.md"]


def test_every_page_is_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        targets = [target.partition("#")[0] for target in LINK.findall(prose(page)) if "://" not in target]
        todo += [(page.parent / target).resolve() for target in targets if target]
    assert not {page for page in (ROOT / "docs").glob("*.md")} - seen


def test_files_that_the_architecture_names_are_there() -> None:
    text = prose(ROOT / "docs" / "architecture.md")
    folder, missing = "", []
    for name in re.findall(r"`((?:meshd|meshwire|meshsdk|sdk|operator|tests)/[\w/.]+|\w+\.py)`", text):
        path = f"sdk/{name}" if name.startswith(("meshwire/", "meshsdk/")) else name
        if "/" in path:
            folder = path.rpartition("/")[0] if path.endswith(".py") else path
        elif path.endswith(".py"):
            path = f"{folder}/{path}"  # beside the one before it
        if not (ROOT / path).exists():
            missing.append(path)
    assert not missing
