"""One target under libFuzzer (atheris), guided by the coverage of our modules.

Started by `python -m tests.fuzz`:
`python -m tests.fuzz.guided TARGET LIBFUZZER-ARGUMENTS…`; ends with libFuzzer's own code.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["meshwire"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv[1]]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
