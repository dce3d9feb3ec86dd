"""``lookonce caption``: captions for a folder, a list, a table or tars of pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from shared.errors import ConfigError, LookonceError

if TYPE_CHECKING:
    from llm_service.sampling import SamplingOptions
    from lookonce.caption import Summary

FAILED, PARTLY_FAILED, INTERRUPTED = 1, 3, 130
#: failures that the summary names
SHOWN_FAILURES = 10

out = Console()
err = Console(stderr=True)


def caption(
    source: Annotated[str, typer.Argument(help="Folder, list, table (JSONL, CSV, Parquet, Arrow), tars, or a glob.")],
    out_folder: Annotated[
        Path, typer.Option("--out", "-o", metavar="DEST", help="Folder to write to; made if missing.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Asked about every picture; may name the row's fields; repeatable.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt; may name the row's fields.")] = None,
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file with the settings.")] = Path(
        "configs/demo.yaml"
    ),
    address: Annotated[str | None, typer.Option(help="A running service; without it pools start for the job.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model; by default the first.")] = None,
    output_format: Annotated[Literal["jsonl", "parquet"], typer.Option("--format", help="Of the output.")] = "jsonl",
    sidecars: Annotated[bool, typer.Option(help="Write a .txt beside every picture as well.")] = False,
    report: Annotated[bool, typer.Option(help="Write a page with samples, report.html, as well.")] = False,
    dedupe: Annotated[bool, typer.Option(help="Ask only once about pictures of equal content.")] = False,
    retry_failed: Annotated[bool, typer.Option(help="Do again what failed before.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Drop the captions that an earlier job left there.")] = False,
    image_column: Annotated[str | None, typer.Option(help="Column of a table with the pictures.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column of a table that names its rows.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest caption, tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="File with a JSON schema that captions follow.")] = None,
) -> None:
    """Caption pictures. Stop it at any moment; the same command goes on. Exit code 3: some rows failed."""
    from lookonce.caption import Job, run
    from lookonce.commands.caption_progress import progress
    from lookonce.service import interruptible
    from shared import log
    from shared.config import load_settings

    try:
        settings = load_settings(config)
        log.configure(settings.log)
        sampling = _sampling(json_schema, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        job = Job(
            source,
            out_folder,
            tuple(prompt or ["Describe the picture."]),
            system=system,
            sampling=sampling,
            model=model,
            address=address,
            image_column=image_column,
            id_column=id_column,
            format=output_format,
            sidecars=sidecars,
            report=report,
            dedupe=dedupe,
            retry_failed=retry_failed,
            overwrite=overwrite,
        )
        with interruptible():
            with progress(err) as (watch, say):
                summary = run(job, settings, watch, say)
            _summarise(summary)
            raise typer.Exit(PARTLY_FAILED if summary.failed else 0)
        raise _stopped(out_folder)
    except LookonceError as error:
        err.print(f"[red]error:[/] {escape(error.message)}", highlight=False)
        raise typer.Exit(FAILED) from error


def _stopped(folder: Path) -> typer.Exit:
    err.print(f"stopped; what was finished is in {folder}, the same command goes on", highlight=False)
    return typer.Exit(INTERRUPTED)


def _sampling(json_schema: Path | None, **options: Any) -> SamplingOptions:
    """Sampling settings.

    Raises:
        ConfigError: a schema that is no JSON object, or a value out of bounds.
    """
    from pydantic import ValidationError

    from llm_service.sampling import SamplingOptions

    schema = None
    if json_schema is not None:
        try:
            schema = json.loads(json_schema.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the JSON schema {json_schema}: {error}") from error
        if not isinstance(schema, dict):
            raise ConfigError(f"{json_schema} holds no JSON schema: that is a JSON object")
    try:
        return SamplingOptions(json_schema=schema, **options)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error


def _summarise(summary: Summary) -> None:
    """The last lines."""
    tally = summary.tally
    for note in summary.notes:
        err.print(f"[dim]·[/] {escape(note)}", highlight=False)
    if summary.errors is not None:
        for number, failure in enumerate(summary.failures()):
            if number == SHOWN_FAILURES:
                err.print(f"… and {summary.failed - SHOWN_FAILURES} more", highlight=False)
                break
            err.print(f"[yellow]failed:[/] {escape(failure['id'])}: {escape(failure['error'])}", highlight=False)
    speed = f"{tally.done / tally.seconds:.1f} images/s" if tally.done else "nothing was left to do"
    out.print(
        f"{summary.captioned} captioned in {summary.out}, {summary.failed} failed"
        f"{f' (see {summary.errors})' if summary.errors else ''}\n"
        f"this run: {tally.done} rows in {tally.seconds:.1f} s, {speed}; {tally.cached} needed no encoder, "
        f"{tally.duplicates} were answered as duplicates; {tally.prompt_tokens} prompt and "
        f"{tally.completion_tokens} caption tokens",
        highlight=False,
        soft_wrap=True,
    )
