"""What is made of the operator's types: the chart's CRDs and their page; run as a program it writes them.

make reference
"""

from __future__ import annotations

from pathlib import Path

from meshoperator.resources.crd_generator import crds, reference

ROOT = Path(__file__).resolve().parents[2]


def pages() -> dict[Path, str]:
    """Path → what should be there."""
    made = {ROOT / "helm" / "shardmesh" / "crds" / name: text for name, text in crds().items()}
    return made | {ROOT / "docs" / "resources.md": reference()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
