"""minio-py's functional tests, all of them: the suite's own program ends with the first that fails.

`minio_functional.py CHECKOUT`: prints the suite's line of JSON for each test.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(sys.argv[1]) / "tests" / "functional"))
suite: Any = importlib.import_module("tests")  # the file's name in the checkout
_call_test = suite._call_test


def _call_and_go_on(*arguments: Any, **options: Any) -> None:
    with contextlib.suppress(suite.TestFailed):
        _call_test(*arguments, **options)


suite._call_test = _call_and_go_on
suite.main()
