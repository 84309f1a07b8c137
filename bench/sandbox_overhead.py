"""What a confined process costs a sample: a photograph's worth of pixels there and back, beside other ways.

Law: one process on one core, wall-clock seconds (most of the cost is waiting for the other side); contenders
take turns (`bench.interleave`). The op does nothing, so that what is left is the way.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from bench.interleave import order
from bench.results import Figure
from bench.subprocess_row import apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    Way = Callable[[], object]

HERE, CONFINED, SEALED = "copied in the same process", "confined (Landlock)", "confined (no files)"
PIPE, FORK, INTERPRETER = "pickled over a socket", "a fork a sample", "an interpreter a sample"
NOTES = {
    HERE: "the cost of a built-in op of the node",
    CONFINED: "the present implementation: an arena in shared memory, a datagram each way",
    SEALED: "the same if the kernel has no Landlock",
    PIPE: "an unconfined process, values pickled, as `multiprocessing` does",
    FORK: "fork, write to shared memory, exit: it remembers nothing, and hides nothing",
    INTERPRETER: "`python -c 'import numpy'`, before any work",
}
_SOURCE = b"""
from meshsdk.userops import image, op

@op(input=image("h", "w", 3), output=image("h", "w", 3))
def same(pixels):
    return pixels
"""
_DEAR = 40  # how many samples fewer the dear ways get


def _ways(stack: ExitStack, pixels: npt.NDArray[np.uint8]) -> dict[str, Way]:
    from meshd.transform.sandbox.sandbox_process import SandboxPolicy, SandboxProcess

    def confined(sealed: bool) -> Way:
        process = SandboxProcess("same", _SOURCE, 256 << 20, SandboxPolicy(sealed=sealed))
        stack.callback(process.close)
        return lambda: process.run_op("same", {}, pixels, key=0, random=False, seconds=60)

    return {
        HERE: pixels.copy,
        CONFINED: confined(False),
        SEALED: confined(True),
        PIPE: _pickled(stack, pixels),
        FORK: _forked,
        INTERPRETER: _new_process,
    }


def _pickled(stack: ExitStack, pixels: npt.NDArray[np.uint8]) -> Way:
    ours, theirs = (end.makefile("rwb") for end in socket.socketpair())
    child = os.fork()
    if child == 0:
        while True:
            try:
                pickle.dump(pickle.load(theirs), theirs, protocol=5)
                theirs.flush()
            except (EOFError, OSError):
                os._exit(0)
    stack.callback(os.waitpid, child, 0)
    stack.callback(os.kill, child, 9)

    def way() -> object:
        pickle.dump(pixels, ours, protocol=5)
        ours.flush()
        return pickle.load(ours)

    return way


def _forked() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _new_process() -> None:
    subprocess.run([sys.executable, "-c", "import numpy"], check=True)


def _measure(side: int, samples: int, rounds: int) -> Iterator[Figure]:
    """In a process of its own."""
    import numpy as np

    pixels = np.random.default_rng(7).integers(0, 256, (side, side, 3), dtype=np.uint8)
    with ExitStack() as stack:
        ways = _ways(stack, pixels)
        for number in range(rounds):
            for name, way in order(ways.items(), number):
                count = max(2, samples // _DEAR if name in (FORK, INTERPRETER) else samples)
                began = time.perf_counter()
                for _ in range(count):
                    way()
                yield Figure(name, number, {"rate": count / (time.perf_counter() - began)})


def measure(side: int, samples: int, rounds: int) -> Iterator[Figure]:
    """Samples a second, by contender and round."""
    return apart(_measure, side, samples, rounds)
