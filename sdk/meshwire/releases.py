"""Which release this is. Nodes name theirs when they refuse something: an SDK of another one says so.

Law: the version of the distribution, `pyproject.toml`; a test holds both together.
"""

from typing import Final

RELEASE: Final = "0.1.0"
HEADER: Final = "x-mesh-release"
