"""Base of all commands: shared options, session, progress and exit codes.

Law: with `--json`, stdout gets one JSON object per line for programs; otherwise it gets text for people,
with progress on stderr: a bar on a terminal, else one line per step if there are few steps.
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from meshsdk.errors import ConfigurationError, DeadlineError, NotFoundError, ServerError
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress, ProgressColumn

    from meshsdk.client.s3_client import Client

EXIT_FAILED, EXIT_USAGE, EXIT_MISSING, EXIT_INTERRUPTED = 1, 2, 3, 130
_PATIENCE = 15.0  # seconds to wait for a server that does not answer


class Steps:
    """Reports the steps of an operation as they end, from any thread. This base class shows nothing."""

    def __call__(self, step: str = "", count: int = 1) -> None:
        """Report that a step has ended, or `count` of them."""

    def reached(self, share: float, shards: tuple[int, int] | None = None) -> None:
        """Report the completed share of the current step, 0…1; `shards`: the numbers of completed and of all
        shards."""


class _Bar(Steps):
    """Shows a bar on stderr."""

    def __init__(self, bar: Progress, what: str, total: int | None) -> None:
        self._bar, self._what = bar, what
        self._task = bar.add_task(what, total=total)
        self._ended = 0

    def __call__(self, step: str = "", count: int = 1) -> None:
        self._ended += count
        description = f"{self._what}: {step}" if step else self._what
        self._bar.update(self._task, completed=self._ended, description=description)

    def reached(self, share: float, shards: tuple[int, int] | None = None) -> None:
        done = f"{share:.0%} of this step" if shards is None else f"{shards[0]} of {shards[1]} shards"
        self._bar.update(self._task, completed=self._ended + share, description=f"{self._what}: {done}")


class _Lines(Steps):
    """Prints one line per step."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._ended = what, total, 0

    def __call__(self, step: str = "", count: int = 1) -> None:
        self._ended += count
        click.echo(f"mesh: {self._what}: {step} ({self._ended} of {self._total})", err=True)


@dataclass(frozen=True, slots=True)
class Session:
    """The environment of a command. `quiet`: no progress; `deadline`: the user's, in seconds, if any."""

    endpoint: str | None
    as_json: bool
    quiet: bool
    ca_cert: str | None = None
    deadline: float | None = None

    def make_client(self, patience: float = _PATIENCE) -> Client:
        """Create a client. It waits `deadline`, or else `patience` seconds for a server that does not answer.
        Raises ConfigurationError."""
        from meshsdk.client.s3_client import connect

        deadline = patience if self.deadline is None else self.deadline
        return connect(self.endpoint, deadline=deadline, ca_cert=self.ca_cert)

    def show(self, text: str, **record: Any) -> None:
        """Print `text` for a person, or `record` for a program."""
        click.echo(json.dumps(record, ensure_ascii=False) if self.as_json else text)

    def tell(self, text: str) -> None:
        """Print a hint for a person on stderr, such as what to do when there is nothing to show."""
        if not (self.as_json or self.quiet):
            click.echo(text, err=True)

    @contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Show a bar of bytes on stderr; the yielded callable advances it, from any thread."""
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
        """Show a bar of `total` steps on stderr, with the elapsed time. The yielded callable ends and names a
        step."""
        if not self.has_bar:
            yield Steps()
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with progress_bar(*columns) as bar:
            yield _Bar(bar, what, total)

    @contextmanager
    def share_bar(self, what: str) -> Iterator[Callable[[float], None]]:
        """Show a bar on stderr; the yielded callable sets the completed share, 0…1."""
        if not self.has_bar:
            yield lambda _: None
            return
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with progress_bar(*columns) as bar:
            task = bar.add_task(what, total=1.0)
            yield lambda share: bar.update(task, completed=share)

    @contextmanager
    def logged_steps(self, what: str, total: int) -> Iterator[Steps]:
        """Like `steps`, for operations with few steps: without a terminal, each is a line on stderr."""
        if self.has_bar:
            with self.steps(what, total) as done:
                yield done
        else:
            yield self.lines(what, total)

    @property
    def has_bar(self) -> bool:
        """Whether progress bars are shown."""
        return not (self.quiet or self.as_json) and sys.stderr.isatty()

    def lines(self, what: str, total: int) -> Steps:
        """Print a line per step, even if other output appears between them."""
        return Steps() if self.quiet or self.as_json else _Lines(what, total)


@contextmanager
def progress_bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """Show a bar on stderr that disappears at the end. Output is printed above the bar only if stdout is a
    terminal, too: otherwise rich would divert it from a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console, above = Console(stderr=True), sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=above) as bar:
        yield bar


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --endpoint-url, --ca-cert, --deadline, --json and --quiet, before or after the command's name,
    and pass a Session."""

    @click.option(
        "--endpoint-url", metavar="URL", help="The store, such as http://host:9000.  [MESH_ENDPOINT]"
    )
    @click.option("--ca-cert", metavar="FILE", help="CA certificates to trust over https.  [MESH_CA_BUNDLE]")
    @click.option(
        "--deadline",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help=f"How long to wait for a server that does not answer [{_PATIENCE:.0f}; preflight: 1].",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
    @click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
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


def json_or_text(text: str) -> Any:
    """Return the value of an op's argument: parsed as JSON if possible, otherwise the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def exit_code(error: Exception) -> int:
    if open_files_message(error):
        return EXIT_FAILED
    if isinstance(error, NotFoundError):
        return EXIT_MISSING
    return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED


def error_code(error: Exception) -> str:
    """Return the code of a server's error, else the name of the error's class."""
    return (error.code if isinstance(error, ServerError) else "") or type(error).__name__


def report_error(error: Exception, *, as_json: bool, about: str = "") -> None:
    """Print an error on stderr. `about` names its subject, if a command works on several."""
    message = open_files_message(error) or str(error)
    if isinstance(error, DeadlineError):
        from meshsdk.client.retry import LONGER

        message = message.replace(LONGER, "To wait longer: --deadline SECONDS.")
    message = f"{about}: {message}" if about else message
    line = json.dumps({"error": error_code(error), "message": message}) if as_json else f"mesh: {message}"
    click.echo(line, err=True)
