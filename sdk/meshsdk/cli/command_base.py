"""What every command shares: options, session, progress and exit codes.

Law: with `--json` a program gets one JSON object a line on stdout; a person gets text, with progress on
stderr: a bar on a terminal, else one line a step where steps are few.
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import click

from meshsdk.errors import ConfigurationError, DeadlineError, NotFoundError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress, ProgressColumn

    from meshsdk.client.s3_client import Client
    from meshsdk.errors import MeshError

EXIT_FAILED, EXIT_USAGE, EXIT_MISSING, EXIT_INTERRUPTED = 1, 2, 3, 130
_PATIENCE = 15.0  # seconds a person waits for a server that does not answer


class Steps:
    """Steps of a piece of work, as they end; from any thread. These nobody is to see."""

    def __call__(self, step: str = "", count: int = 1) -> None:
        """A step has ended, or `count` of them."""

    def reached(self, share: float) -> None:
        """So much of the step under way is done, 0…1."""


class _Bar(Steps):
    """On stderr."""

    def __init__(self, bar: Progress, what: str, total: int | None) -> None:
        self._bar, self._what = bar, what
        self._task = bar.add_task(what, total=total)
        self._ended = 0

    def __call__(self, step: str = "", count: int = 1) -> None:
        self._ended += count
        told = f"{self._what}: {step}" if step else self._what
        self._bar.update(self._task, completed=self._ended, description=told)

    def reached(self, share: float) -> None:
        self._bar.update(
            self._task, completed=self._ended + share, description=f"{self._what}: {share:.0%} of this step"
        )


class _Lines(Steps):
    """A line each."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._ended = what, total, 0

    def __call__(self, step: str = "", count: int = 1) -> None:
        self._ended += count
        click.echo(f"mesh: {self._what}: {step} ({self._ended} of {self._total})", err=True)


@dataclass(frozen=True, slots=True)
class Session:
    """A command's surroundings. `quiet`: no progress; `deadline`: in seconds, if the user says."""

    endpoint: str | None
    as_json: bool
    quiet: bool
    ca_cert: str | None = None
    deadline: float | None = None

    def make_client(self, patience: float = _PATIENCE) -> Client:
        """One that waits `deadline`, else `patience` seconds for a server that does not answer. Raises
        ConfigurationError."""
        from meshsdk.client.s3_client import connect

        deadline = patience if self.deadline is None else self.deadline
        return connect(self.endpoint, deadline=deadline, ca_cert=self.ca_cert)

    def show(self, text: str, **record: Any) -> None:
        """Prints `text` for a person, or `record` for a program."""
        click.echo(json.dumps(record, ensure_ascii=False) if self.as_json else text)

    def tell(self, text: str) -> None:
        """A hint for a person, beside what is printed: what to do where there is nothing to show."""
        if not (self.as_json or self.quiet):
            click.echo(text, err=True)

    @contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar of bytes on stderr; the callable adds to it, from any thread."""
        if not self.has_bar:
            yield lambda _: None
            return
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        with progress_bar(*columns, TransferSpeedColumn()) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)

    @contextmanager
    def steps(self, what: str, total: int | None = None) -> Iterator[Steps]:
        """A bar of `total` steps on stderr, with the time they have taken. Calling it ends a step, and says
        which."""
        if not self.has_bar:
            yield Steps()
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with progress_bar(*columns) as bar:
            yield _Bar(bar, what, total)

    @contextmanager
    def logged_steps(self, what: str, total: int) -> Iterator[Steps]:
        """`steps` of work that has few: where there is no terminal, each is a line on stderr."""
        if self.has_bar:
            with self.steps(what, total) as done:
                yield done
        else:
            yield self.lines(what, total)

    @property
    def has_bar(self) -> bool:
        """Whether somebody looks."""
        return not (self.quiet or self.as_json) and sys.stderr.isatty()

    def lines(self, what: str, total: int) -> Steps:
        """A line a step, also where other things are printed between them."""
        return Steps() if self.quiet or self.as_json else _Lines(what, total)


@contextmanager
def progress_bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """A bar on stderr, gone in the end. What is printed goes above it only where stdout is a terminal, too:
    rich would lead it past a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console, above = Console(stderr=True), sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=above) as bar:
        yield bar


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --endpoint-url, --ca-cert, --deadline, --json and --quiet, before or after the command's name, and
    passes a Session."""

    @click.option("--endpoint-url", metavar="URL", help="The store, as http://host:9000.  [MESH_ENDPOINT]")
    @click.option("--ca-cert", metavar="FILE", help="Authorities to believe over https.  [MESH_CA_BUNDLE]")
    @click.option(
        "--deadline",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help=f"How long a server that does not answer is waited for [{_PATIENCE:.0f}; preflight: 1].",
    )
    @click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
    @click.option("-q", "--quiet", is_flag=True, help="No progress.")
    @click.pass_context
    @functools.wraps(command)
    def wrapped(
        context: click.Context,
        /,
        *,
        endpoint_url: str | None,
        ca_cert: str | None,
        deadline: float | None,
        as_json: bool,
        quiet: bool,
        **rest: Any,
    ) -> Any:
        outer = context.find_object(Session) or Session(None, False, False)
        session = Session(
            endpoint_url or outer.endpoint,
            as_json or outer.as_json,
            quiet or outer.quiet,
            ca_cert or outer.ca_cert,
            outer.deadline if deadline is None else deadline,
        )
        context.obj = session
        return command(session, **rest)

    return wrapped


def exit_code(error: MeshError) -> int:
    if isinstance(error, NotFoundError):
        return EXIT_MISSING
    return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED


def report_error(error: MeshError, *, as_json: bool, stream: IO[str] | None = None) -> None:
    """Tells an error on stderr."""
    code = error.code if isinstance(error, ServerError) else type(error).__name__
    told = str(error)
    if isinstance(error, DeadlineError):
        from meshsdk.client.retry import LONGER

        told = told.replace(LONGER, "To wait longer: --deadline SECONDS.")
    line = json.dumps({"error": code, "message": told}) if as_json else f"mesh: {told}"
    click.echo(line, file=stream or sys.stderr)
