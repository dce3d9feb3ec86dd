"""What stands on disk of a file and of a batch, which is also what clients see of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from llm_service.api.schemas import Body

#: statuses in which nothing changes any more
FINAL = frozenset({"failed", "completed", "expired", "cancelled"})
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions"]
Key = Annotated[str, StringConstraints(max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]


class StoredFile(BaseModel):
    """A file, as OpenAI describes one."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class Counts(BaseModel):
    """Lines of a batch: all, answered, failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class LineFault(BaseModel):
    """Why an input file was refused; ``line`` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineFaults(BaseModel):
    """The first faults of an input file."""

    object: Literal["list"] = "list"
    data: list[LineFault]


class InputDetails(BaseModel):
    """Of the input tokens, those that the engine's prefix cache had."""

    cached_tokens: int = 0


class OutputDetails(BaseModel):
    """Of the output tokens; for OpenAI's clients, which want the field."""

    reasoning_tokens: int = 0


class BatchUsage(BaseModel):
    """Tokens of all answered lines."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class Batch(BaseModel):
    """A batch, as OpenAI describes one; times are whole seconds since 1970."""

    model_config = ConfigDict(validate_assignment=True)

    id: str
    object: Literal["batch"] = "batch"
    endpoint: BatchEndpoint
    errors: LineFaults | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None
    usage: BatchUsage | None = None


class BatchState(BaseModel):
    """What stands in ``batch.json``.

    Attributes:
        batch: what clients see.
        output_seconds: life of its output files; None for ever.
        outcome: the final status that a batch in ``finalizing`` is about to have.
        output_name, error_name: ids that its files will have.
    """

    batch: Batch
    output_seconds: int | None = None
    outcome: Status | None = None
    output_name: str | None = None
    error_name: str | None = None


class Expiry(Body):
    """When a file goes, counted from its making."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class BatchRequest(Body):
    """Body of ``POST /v1/batches``.

    Attributes:
        completion_window: OpenAI's ``24h``, or another number of hours (``h``), minutes (``m``) or seconds (``s``).
    """

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: str = Field(pattern=r"^[1-9][0-9]{0,5}[hms]$")
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    output_expires_after: Expiry | None = None

    def window_seconds(self) -> int:
        """The completion window, seconds."""
        return int(self.completion_window[:-1]) * {"h": 3600, "m": 60, "s": 1}[self.completion_window[-1]]


class DeletedFile(BaseModel):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
