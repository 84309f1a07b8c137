"""The pages of the site: every link of them leads to one of them, and each is in the navigation."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from posixpath import normpath

import pytest

ROOT = Path(__file__).resolve().parents[3]
SITE = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = tmp_path_factory.mktemp("site") / "pages"
    SITE["write"](target)
    return target


def test_every_link_leads_to_a_page_or_a_picture(pages: Path) -> None:
    fenced, links = SITE["_FENCED"], 0
    for page in pages.rglob("*.md"):
        for target in LINK.findall(fenced.sub("", page.read_text())):
            if "://" in target or target.startswith("mailto:"):
                continue
            links += 1
            place = normpath(f"{page.parent.relative_to(pages).as_posix()}/{target}")
            assert (pages / place).is_file(), f"{page.name}: {target}"
    assert links > 500


def test_the_navigation_has_every_page(pages: Path) -> None:
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {page.relative_to(pages).as_posix() for page in pages.rglob("*.md")}
    assert named == {name for name in there if not re.fullmatch(r"decisions/\d.*", name)}


def test_links_to_code_become_words() -> None:
    code = "\n```\n[a](../b.py)\n```\n"
    text = f"see [the code](../meshd/cli/serve.py), [ops](ops.md#resize) and [why](decisions/){code}"
    changed = f"see the code, [ops](ops.md#resize) and [why](decisions/index.md){code}"
    assert SITE["relinked"](text, "docs/sdk.md", "sdk.md") == changed
    assert SITE["relinked"]("[x](docs/ops.md)", "README.md", "index.md") == "[x](ops.md)"
