"""The ``lookonce`` command."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lookonce.client import Answer, Client, data_url
from lookonce.commands import cache
from lookonce.commands.caption import caption
from lookonce.commands.reload import hangups, obey, reload_command
from lookonce.commands.top import top
from lookonce.listening import free_port
from lookonce.report import answer_table
from lookonce.service import interruptible, running, service
from shared import log
from shared.config import Dtype, Settings, load_settings
from shared.errors import LookonceError, RequestError, Unavailable

DEFAULT_CONFIG = Path("configs/demo.yaml")
DEFAULT_URL = "http://127.0.0.1:8000"
#: exit codes: a person's mistake or a failure; some images of a batch failed
FAILED, PARTLY_FAILED = 1, 3

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
out = Console()
err = Console(stderr=True)

app.command()(top)
app.add_typer(cache.app, name="cache")
app.command()(caption)
app.command("reload")(reload_command)

Config = Annotated[Path, typer.Option("--config", "-c", help="YAML file with the settings.")]
Url = Annotated[str | None, typer.Option(help="A running service; without it one is started for this command.")]
Result = TypeVar("Result")


def _fail(error: LookonceError) -> NoReturn:
    err.print(f"[red]error:[/] {escape(error.message)}", highlight=False)
    raise typer.Exit(FAILED)


def _step(sentence: str) -> None:
    err.print(f"[dim]·[/] {sentence}", highlight=False)


def _settings(config: Path, **http: object) -> Settings:
    settings = load_settings(config)
    changes = {name: value for name, value in http.items() if value is not None}
    settings = settings.model_copy(update={"http": settings.http.model_copy(update=changes)})
    log.configure(settings.log)
    return settings


def _with_service(config: Path, url: str | None, work: Callable[[str], Result]) -> Result:
    """Runs ``work`` against a running service, or against one started for it alone."""
    if url is not None:
        return work(url)
    with running(_settings(config, port=free_port()), _step) as own:
        return work(own)


@app.command()
def serve(
    config: Config = DEFAULT_CONFIG,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
) -> None:
    """Serve the configured models until Ctrl-C; SIGHUP, or `lookonce reload`, reads the file again."""
    try:
        read = partial(_settings, config, host=host, port=port)
        with interruptible(), hangups() as hung_up, service(read(), _step) as own:
            out.print(f"Serving at [bold]{own.url}[/]  (POST /v1/chat/completions, GET /metrics; Ctrl-C ends it)")
            obey(hung_up, own, config, read, _step)
    except LookonceError as error:
        _fail(error)


@app.command()
def ask(
    words: Annotated[list[str], typer.Argument(metavar="IMAGE… QUESTION", help="Files or URLs, then the question.")],
    config: Config = DEFAULT_CONFIG,
    url: Url = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, tokens.")] = 128,
    timings: Annotated[bool, typer.Option(help="Show where each image came from and what each step took.")] = False,
) -> None:
    """Ask a question about one or more images."""
    *images, question = words
    try:
        urls = [image if "://" in image or image.startswith("data:") else data_url(Path(image)) for image in images]
        if Path(question).is_file():
            raise RequestError(f"the last argument must be the question, but {question} is a file")
        with interruptible():
            answer = _with_service(config, url, lambda at: asyncio.run(_ask(at, urls, question, max_tokens)))
            out.print(answer.text, markup=False, highlight=False)
            if timings:
                err.print(answer_table([(question, answer)]))
            return
        raise typer.Exit(130)
    except LookonceError as error:
        _fail(error)


async def _ask(url: str, images: list[str], question: str, max_tokens: int) -> Answer:
    async with Client(url) as client:
        return await client.ask(await client.model(), images, question, max_tokens=max_tokens)


@app.command()
def encode(
    folder: Annotated[Path, typer.Argument(help="Folder with pictures; subfolders are searched too.")],
    out_file: Annotated[Path, typer.Option("--out", "-o", help="safetensors file to write.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of an encoder without a language model, such as C-RADIO.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file whose first model is the encoder, instead.")
    ] = None,
    features: Annotated[
        bool, typer.Option("--features/--summary", help="One vector per patch, or one per picture.")
    ] = True,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the encoder and of the tensors; else the file's, else float32.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Torch device; else the file's, else cpu.")] = None,
) -> None:
    """Encode every picture of a folder with an encoder alone. Exit code 3: some pictures failed."""
    from lookonce.encode import encode_folder, encoder_alone

    columns = (TextColumn("pictures"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    try:
        model = encoder_alone(checkpoint, config)
        with interruptible(), Progress(*columns, TimeRemainingColumn(), console=err) as bar:
            task = bar.add_task("", total=None, note="loading the encoder")
            report = encode_folder(
                folder,
                out_file,
                model.checkpoint,
                summary=not features,
                dtype=dtype or model.encoder.dtype,
                device=device or model.encoder.device,
                progress=lambda done, total, failed: bar.update(
                    task, completed=done, total=total, note=f"{failed} failed"
                ),
            )
            bar.stop()
            for name, reason in report.failures:
                err.print(f"[yellow]failed:[/] {escape(name)}: {escape(reason)}", highlight=False)
            out.print(f"{report.encoded} pictures in {out_file}; {len(report.failures)} failed", highlight=False)
            raise typer.Exit(PARTLY_FAILED if report.failures else 0)
        raise typer.Exit(130)
    except LookonceError as error:
        _fail(error)


@app.command()
def demo(config: Config = DEFAULT_CONFIG) -> None:
    """Start everything, caption sample pictures, ask about one twice, and show what came from the cache."""
    from lookonce.demo import show

    try:
        with interruptible():
            settings = _settings(config, port=free_port())
            with running(settings, _step) as url:
                asyncio.run(show(url, settings.models[0].checkpoint / "samples", out))
            return
        raise typer.Exit(130)
    except LookonceError as error:
        _fail(error)


@app.command(name="inspect")
def inspect_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    size: Annotated[
        list[str] | None, typer.Option(help="Picture to count tokens for, as 1024x768; repeatable.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="To compute memory for.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell a checkpoint's family, sizes, tokens and memory, and what is wrong with it. Exit code 1: something is."""
    from lookonce.inspect import SIZES, inspect, inspection_table

    try:
        found = inspect(checkpoint, dtype, [_picture_size(text) for text in size] if size else SIZES)
    except LookonceError as error:
        _fail(error)
    if as_json:
        out.print_json(data=found.body())
    else:
        out.print(inspection_table(found))
        for problem in found.problems:
            err.print(f"[red]problem:[/] {escape(problem)}", highlight=False)
    if found.problems:
        raise typer.Exit(FAILED)


def _picture_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})\s*[x×,]\s*(\d{1,6})", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise RequestError(f"a picture's size is written as 1024x768, not {text!r}")
    return int(match[1]), int(match[2])


@app.command()
def key() -> None:
    """Make an API key: give the key to its owner, and its hash to access.tenants in the configuration."""
    from llm_service.api.access import new_key

    secret, hashed = new_key()
    out.print(f"key   {secret}\nhash  {hashed}", highlight=False)


@app.command()
def doctor(config: Config = DEFAULT_CONFIG) -> None:
    """Say what is installed, what is missing, and what the fix is."""
    from lookonce.doctor import examine, findings_table

    findings = examine(config)
    out.print(findings_table(findings))
    if any(finding.fix for finding in findings if not finding.ok):
        raise typer.Exit(FAILED)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except Unavailable as error:  # pragma: no cover - commands report their own errors
        err.print(error.message)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
