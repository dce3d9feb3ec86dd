"""Lines of a batch's input and of its two outputs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from llm_service.api.batches.records import LineFault, LineFaults
from llm_service.api.responses import error_body
from shared.errors import LookonceError
from shared.idset import IdSet

#: faults that are told of one file
MAX_FAULTS = 100
MAX_ID = 512


class Line(BaseModel):
    """One request of the input file; its body is looked at when its turn comes."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Checked:
    """What reading the whole input once says.

    Attributes:
        total: requests in it.
        faults: why it is refused; None for a good one.
    """

    total: int
    faults: LineFaults | None


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that hold something, with their numbers from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def check(path: Path, endpoint: str, limit: int) -> Checked:
    """Reads an input file once, a line at a time.

    Args:
        path: of the file.
        endpoint: that every line must name.
        limit: most requests.
    """
    faults: list[LineFault] = []
    seen, total = IdSet(), 0
    for number, raw in lines(path):
        total += 1
        if total > limit:
            message = f"the file has more than {limit} requests; split it"
            faults.append(LineFault(code="too_many_requests", message=message))
            break
        if (fault := _fault(number, raw, endpoint, seen)) is not None:
            faults.append(fault)
            if len(faults) >= MAX_FAULTS:
                break
    if total == 0:
        faults.append(LineFault(code="empty_file", message="the file holds no request"))
    return Checked(total, LineFaults(data=faults) if faults else None)


def _fault(number: int, raw: bytes, endpoint: str, seen: IdSet) -> LineFault | None:
    try:
        line = Line.model_validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            message = "this line is not a JSON object"
            return LineFault(code="invalid_json_line", message=message, line=number)
        param = ".".join(map(str, first["loc"])) or None
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_type"
        return LineFault(code=code, message=f"{param}: {first['msg']}", line=number, param=param)
    if not 0 < len(line.custom_id) <= MAX_ID:
        message = f"custom_id must have 1 to {MAX_ID} characters"
        return LineFault(code="invalid_custom_id", message=message, line=number, param="custom_id")
    if line.method != "POST":
        return LineFault(code="invalid_method", message="method must be POST", line=number, param="method")
    if line.url != endpoint:
        message = f"url must be the batch's endpoint, {endpoint}"
        return LineFault(code="mismatched_endpoint", message=message, line=number, param="url")
    if not seen.add(line.custom_id):
        message = "another line has this custom_id; each must have its own"
        return LineFault(code="duplicate_custom_id", message=message, line=number, param="custom_id")
    return None


def answered(custom_id: str, request: str, body: dict[str, Any]) -> dict[str, Any]:
    """A line of the output file."""
    response = {"status_code": 200, "request_id": request, "body": body}
    return {"id": _name(), "custom_id": custom_id, "response": response, "error": None}


def refused(custom_id: str, request: str, error: LookonceError) -> dict[str, Any]:
    """A line of the error file: what the endpoint would have answered."""
    response = {"status_code": error.status, "request_id": request, "body": error_body(error)}
    return {"id": _name(), "custom_id": custom_id, "response": response, "error": None}


def left_out(custom_id: str, outcome: str) -> dict[str, Any]:
    """A line of the error file for a request that was never answered."""
    why = "the batch was cancelled" if outcome == "cancelled" else "the completion window had passed"
    error = {"code": f"batch_{outcome}", "message": f"This request was not executed: {why}."}
    return {"id": _name(), "custom_id": custom_id, "response": None, "error": error}


def _name() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def custom_id(raw: bytes) -> str:
    """Of a line that :func:`check` passed."""
    return str(json.loads(raw)["custom_id"])
