"""``caption``: a source of pictures in, their captions out, through the two pools; stop and go on at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from llm_service.captioning.captioner import Captioner, Marks
from llm_service.captioning.duplicates import Index
from llm_service.captioning.output import INDEX, REPORT, Output
from llm_service.captioning.parquet import Parquet
from llm_service.captioning.patience import Patience
from llm_service.captioning.question import Question
from llm_service.captioning.report import write_report
from llm_service.captioning.rows import Outcome, Source
from llm_service.captioning.sidecars import check_sidecars, write_sidecars
from llm_service.captioning.sources import Columns, open_source
from llm_service.captioning.tally import Tally
from llm_service.sampling import SamplingOptions
from lookonce.backends import Desks, local, remote
from lookonce.service import Report, Service
from shared.config import Settings, load_settings
from shared.durable import read_lines
from shared.errors import ConfigError
from shared.shards import JsonLines, RowFormat, fingerprint

#: called after every row
Watch = Callable[[Tally], None]
FORMATS: dict[str, type[RowFormat]] = {"jsonl": JsonLines, "parquet": Parquet}


@dataclass(frozen=True)
class Job:
    """What to caption, and how.

    Attributes:
        source: folder, file or glob; see ``docs/captioning.md``.
        out: folder of the output.
        prompts: templates, each asked about every picture.
        system: template of a system prompt.
        sampling: how to answer; greedy by default.
        model: name of the model; None takes the first.
        address: base URL of a service that runs, as ``http://host:8000``; None starts pools for this job.
        image_column, id_column: of tables; None finds them.
        format: of the output.
        dedupe: ask only once about pictures of equal content.
        retry_failed: do again what failed before.
        overwrite: drop what an earlier job left in ``out``, and captions that stand beside pictures.
        sidecars: write every caption beside its picture as well.
        report: write a page with samples as well.
    """

    source: str
    out: Path
    prompts: tuple[str, ...]
    system: str | None = None
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(temperature=0, max_tokens=128))
    model: str | None = None
    address: str | None = None
    image_column: str | None = None
    id_column: str | None = None
    format: Literal["jsonl", "parquet"] = "jsonl"
    dedupe: bool = False
    retry_failed: bool = False
    overwrite: bool = False
    sidecars: bool = False
    report: bool = False


@dataclass(frozen=True)
class Summary:
    """What became of a job.

    Attributes:
        captioned, failed: rows in the output and in the errors file, of all runs.
        tally: of this run alone.
        out: folder of the output.
        errors: file with the rows that failed; None when there are none.
        notes: what a person should know.
    """

    captioned: int
    failed: int
    tally: Tally
    out: Path
    errors: Path | None
    notes: tuple[str, ...] = ()

    def failures(self) -> Iterator[dict[str, Any]]:
        """Rows that failed, with ``id`` and ``error``."""
        return iter(()) if self.errors is None else read_lines(self.errors)


def caption(
    source: str | Path,
    out: str | Path,
    prompts: str | Sequence[str],
    *,
    config: str | Path = "configs/demo.yaml",
    **options: Any,
) -> Summary:
    """Captions every picture of a source; the same call goes on where an earlier one was stopped.

    Args:
        source, out, prompts: see :class:`Job`; one prompt may be a plain string.
        config: YAML file with the settings.
        options: further fields of :class:`Job`.

    Raises:
        ConfigError: something is wrong with what was asked for; nothing has begun.
        InUse: another process writes there.
        StorageError: the disk is full; what was finished is safe.
        JobStopped: the pools do not answer.
    """
    texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    return run(Job(str(source), Path(out), texts, **options), load_settings(Path(config)))


def run(
    job: Job,
    settings: Settings,
    watch: Watch = lambda _: None,
    report: Report = lambda _: None,
    pools: Service | None = None,
) -> Summary:
    """:func:`caption` for settings that are loaded, with somebody who watches.

    Args:
        job: what to do.
        settings: the whole tree.
        watch: called after every row.
        report: called with a sentence at every step.
        pools: of a service that runs in this process; None starts its own, or asks the service at ``job.address``.
    """
    question = Question.parse(job.prompts, job.system, job.sampling)
    source = open_source(job.source, Columns(job.image_column, job.id_column))
    question.check(source.fields)
    _check_apart(job.out, source)
    if job.sidecars:
        check_sidecars(source, len(job.prompts))
    backend = remote(job.address, job.model, settings) if job.address else local(job.model, settings, pools)
    marks = Marks(backend.model, fingerprint(backend.identity), question.fingerprint)
    identity = {**source.identity, "model": backend.identity, "format": job.format, **question.identity()}
    rows, again = FORMATS[job.format](), {"retry": job.retry_failed, "overwrite": job.overwrite}
    with Output(job.out, identity, rows, settings.jobs, **again) as output:
        tally = Tally(source.total, output.captioned + output.failed)
        if source.total is None or tally.before < source.total:
            with backend.open(report) as desks:
                report(f"Captioning {job.source}: {source.total or '?'} rows, {tally.before} of them done before")
                tally = Tally(source.total, tally.before)
                connect = partial(_captioner, desks, settings, question, marks)
                for outcome in _outcomes(job, source, settings, output, connect):
                    if output.add(outcome):
                        tally.add(outcome)
                        watch(tally)
        output.flush()
        notes = (*source.notes, *_extras(job, source, settings, output))
        errors = output.errors if output.failed else None
        return Summary(output.captioned, output.failed, tally, job.out, errors, notes)


def _extras(job: Job, source: Source, settings: Settings, output: Output) -> Iterator[str]:
    """Sidecars and the page; says what became of them."""
    if job.sidecars:
        written = write_sidecars(source, output.store.rows(), overwrite=job.overwrite)
        left = f"; {written.left} were there before and are as they were" if written.left else ""
        yield f"{written.new} captions written beside their pictures{left}"
    if job.report:
        page = job.out / REPORT
        count = f"{output.captioned} captioned, {output.failed} failed"
        write_report(
            page, source, output.store.rows(), output.failures(), settings.images, f"Captions of {job.source}", count
        )
        yield f"samples in {page}"


def _outcomes(
    job: Job, source: Source, settings: Settings, output: Output, connect: Callable[..., Any]
) -> Iterator[Outcome]:
    from llm_service.captioning.ray_flow import outcomes, start_index

    index = start_index(job.out / INDEX) if job.dedupe else None
    return outcomes(source.fragments, output.done, connect, settings.jobs, index)


@asynccontextmanager
async def _captioner(
    desks: Desks, settings: Settings, question: Question, marks: Marks, index: Index | None
) -> AsyncIterator[Captioner]:
    """What one worker captions with; made in the worker."""
    async with desks() as desk:
        patience = Patience(settings.jobs.patience, settings.jobs.row_timeout)
        captioner = Captioner(desk, question, marks, settings.images, patience, index)
        try:
            yield captioner
        finally:
            await captioner.close()


def _check_apart(out: Path, source: Source) -> None:
    """Refuses an output that is part of the input, or that looks like a file: it is a folder."""
    if (suffix := out.suffix.removeprefix(".")) in FORMATS and not out.is_dir():
        raise ConfigError(f"--out names a folder, to which parts are added; write --out {out.stem} --format {suffix}")
    if str(out.expanduser().resolve()) in {str(Path(name).resolve()) for name in source.files if out.exists()}:
        raise ConfigError(f"--out {out} is one of the input files; choose another")
