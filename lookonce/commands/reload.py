"""``lookonce reload``: a running ``lookonce serve`` takes on its changed file, while requests run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.markup import escape

from lookonce.rollout import Report, reload
from lookonce.service import Service
from shared.config import Settings
from shared.errors import ConfigError, LookonceError

#: a file for every server of this user's, by which it is found
PREFIX = "lookonce-serve-"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Notice:
    """What a server tells about itself.

    Attributes:
        pid: of its process.
        config: the file that it serves.
        url: where it listens.
        reloads: how often it has read its file again.
        fault: why the last time changed nothing; None if it did.
    """

    pid: int
    config: str
    url: str
    reloads: int = 0
    fault: str | None = None


@contextmanager
def hangups() -> Iterator[int]:
    """Turns SIGHUP into bytes to read from a pipe; the loss of the terminal, which sends it too, ends the process."""
    reader, writer = os.pipe()
    in_terminal = os.isatty(0)

    def on_hangup(_: int, __: FrameType | None) -> None:
        if in_terminal and not os.isatty(0):
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            os.write(writer, b"!")

    before = signal.signal(signal.SIGHUP, on_hangup)
    try:
        yield reader
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(reader)
        os.close(writer)


def obey(hung_up: int, service: Service, config: Path, read: Callable[[], Settings], report: Report) -> None:
    """Reloads at every hang-up; never returns.

    Args:
        hung_up: from :func:`hangups`.
        service: that runs.
        config: its file, for :func:`lookonce reload <reload_command>` to find it by.
        read: reads the settings again.
        report: called with a sentence at every step.
    """
    notice = Notice(os.getpid(), str(config.resolve()), service.url)
    with _posted() as post:
        post(notice)
        while os.read(hung_up, 1):
            try:
                service, fault = reload(service, read(), report), None
                report("The changed settings are in force")
            except LookonceError as error:
                fault = error.message
                report(fault)
            notice = replace(notice, reloads=notice.reloads + 1, fault=fault)
            post(notice)


@contextmanager
def _posted() -> Iterator[Callable[[Notice], None]]:
    """A place for a notice that others of this user find, for the length of a ``with`` block."""
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{os.getpid()}.json"

    def post(notice: Notice) -> None:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=PREFIX)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(notice), file)
        Path(name).rename(path)

    try:
        yield post
    finally:
        path.unlink(missing_ok=True)


def servers() -> list[Notice]:
    """Servers of this user that run on this machine."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.stat().st_uid != os.getuid() or path.is_symlink():
                continue
            notice = Notice(**json.loads(path.read_text()))
            if psutil.pid_exists(notice.pid):
                found.append(notice)
    return found


def ask_to_reload(notice: Notice, timeout: float) -> str | None:
    """Sends the signal and waits for the outcome.

    Returns:
        Why nothing was changed; None if the new settings are in force.

    Raises:
        ConfigError: the server ended, or did not finish in time.
    """
    os.kill(notice.pid, signal.SIGHUP)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        now = next((found for found in servers() if found.pid == notice.pid), None)
        if now is None:
            raise ConfigError(f"the server {notice.pid} at {notice.url} has ended")
        if now.reloads > notice.reloads:
            return now.fault
        time.sleep(POLL_SECONDS)
    raise ConfigError(f"the server {notice.pid} has not finished after {timeout:g} s; it may still do so")


def reload_command(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Only the server of this file; needed if there are several.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the new replicas.")] = 900.0,
) -> None:
    """Make a running `lookonce serve` on this machine take on its changed file. Exit code 1: it did not."""
    out, err = Console(), Console(stderr=True)
    try:
        found = [notice for notice in servers() if config is None or notice.config == str(config.resolve())]
        if len(found) != 1:
            several = ", ".join(f"{notice.config} (process {notice.pid})" for notice in found)
            raise ConfigError(f"say which with --config: {several}" if found else "no such server runs here")
        fault = ask_to_reload(found[0], timeout)
        if fault is not None:
            raise ConfigError(fault)
        out.print(f"{found[0].config} is in force at {found[0].url}", highlight=False)
    except LookonceError as error:
        err.print(f"[red]error:[/] {escape(error.message)}", highlight=False)
        raise typer.Exit(1) from error
