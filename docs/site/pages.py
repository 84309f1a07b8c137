"""Makes the pages of the site: `python docs/site/pages.py FOLDER`. Those of docs/, with the pages of the root
and of the chart and a list of the decisions; links to code become plain text.

Law: a page reads as well in the repository as on the site, so nothing is written for the site alone. What
makes HTML of the pages is not known here.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from posixpath import normpath
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
BROUGHT: Final = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "helm/shardmesh/README.md": "values.md",
}
"""Pages by where they lie in the repository, and where the site has them."""
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def write(target: Path) -> None:
    """Write all pages and pictures of the site into a folder, in place of what was there."""
    if target.exists():
        shutil.rmtree(target)
    ignored = shutil.ignore_patterns("site", "README.md")
    shutil.copytree(ROOT / "docs", target, ignore=ignored)
    for path in target.rglob("*.md"):
        name = path.relative_to(target).as_posix()
        path.write_text(relinked(path.read_text(), f"docs/{name}", name))
    for place, name in BROUGHT.items():
        (target / name).write_text(relinked((ROOT / place).read_text(), place, name))
    (target / "decisions" / "index.md").write_text(decisions())


def decisions() -> str:
    """Return a page with a line for each decision."""
    lines = [
        "# Decisions",
        "",
        "Why things are as they are: the problem, what was tried, what was decided. Figures are those of the",
        "time. A decision is in force unless its page names the one that supersedes it, in whole or in part.",
        "",
    ]
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join([*lines, ""])


def relinked(text: str, place: str, name: str) -> str:
    """Return a page's text with its links as the site has them. `place`: where it lies in the repository;
    `name`: where the site has it. What the site does not have becomes plain text."""
    parts, at = [], 0
    for block in _FENCED.finditer(text):  # code is left as it is
        parts += [_relink(text[at : block.start()], place, name), block[0]]
        at = block.end()
    return "".join([*parts, _relink(text[at:], place, name)])


def _relink(text: str, place: str, name: str) -> str:
    def change(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        path, mark, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        wanted = normpath(f"{Path(place).parent.as_posix()}/{path}")
        there = BROUGHT.get(wanted, wanted.removeprefix("docs/") if wanted.startswith("docs/") else "")
        if wanted == "docs/decisions":
            there = "decisions/index.md"
        if not there:
            return label
        up = "../" * name.count("/")
        return f"{image}[{label}]({up}{there}{mark}{anchor})"

    return _LINK.sub(change, text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
