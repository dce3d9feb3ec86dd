"""``/v1/embeddings``: what an encoder makes of pictures, as numbers, base64 or a safetensors file."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from safetensors.torch import save

from llm_service.api.access import Tenant
from llm_service.api.accounts import measured, observe_images
from llm_service.api.endpoint import Endpoint, parse
from llm_service.api.schemas import Body, ImageUrl
from llm_service.api.vision import ImageSource
from shared.items import VisionItem
from shared.keys import Namespace
from shared.records import decode_record

SAFETENSORS = "application/octet-stream"


class EmbeddingRequest(Body):
    """Body of ``POST /v1/embeddings``.

    Attributes:
        input: a picture's URL, as in ``image_url`` of a chat, or several.
        encoding_format: numbers; base64 of little-endian float32; or one safetensors file in the encoder's own dtype.
    """

    model: str
    input: str | ImageUrl | Annotated[list[str | ImageUrl], Field(min_length=1)]
    encoding_format: Literal["float", "base64", "safetensors"] = "float"
    user: str | None = None

    def sources(self) -> list[ImageSource]:
        """Where the pictures are, in order."""
        given = self.input if isinstance(self.input, list) else [self.input]
        urls = [ImageUrl(url=one) if isinstance(one, str) else one for one in given]
        return [ImageSource(one.url, one.fallback) for one in urls]


class Embedding(BaseModel):
    """One picture's values, row-major in ``shape``: ``[rows, columns, width]``, or ``[width]`` of a summary."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    shape: list[int]


class EmbeddingUsage(BaseModel):
    """Rows of all pictures, and of those that needed no encoder."""

    prompt_tokens: int
    total_tokens: int
    cached_image_tokens: int


class EmbeddingList(BaseModel):
    """Embeddings in the order of the input."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


async def embed(endpoint: Endpoint, body: bytes, tenant: Tenant) -> Response:
    """Answers one request for embeddings.

    Raises:
        LookonceError: the request is at fault, or the pool is.
    """
    with measured("embeddings") as outcome:
        request = await parse(EmbeddingRequest, body)
        service = endpoint.service(request.model, tenant)
        outcome.model = request.model
        with endpoint.admitted():
            async with endpoint.deadline():
                images = await service.images.fetch(request.sources(), tenant.salt)
                items = await service.images.resolve_whole(images, tenant.salt)
        observe_images(request.model, items)
        # megabytes of numbers become text beside the event loop
        response = await asyncio.to_thread(_response, request, items)
        outcome.status = response.status_code
        return response


def _response(request: EmbeddingRequest, items: Sequence[VisionItem]) -> Response:
    tensors = [_values(item) for item in items]
    if request.encoding_format == "safetensors":
        named = {str(index): tensor.contiguous() for index, tensor in enumerate(tensors)}
        return Response(save(named, _notes(request, items)), media_type=SAFETENSORS)
    data = [_embedding(index, tensor, request.encoding_format) for index, tensor in enumerate(tensors)]
    rows = sum(item.tokens for item in items)
    usage = {
        "prompt_tokens": rows,
        "total_tokens": rows,
        "cached_image_tokens": sum(item.tokens for item in items if item.cached),
    }
    return JSONResponse({"object": "list", "model": request.model, "data": data, "usage": usage})


def _values(item: VisionItem) -> torch.Tensor:
    """``[rows, columns, width]``, or ``[width]`` where an encoder gives one row for every picture."""
    assert item.record is not None
    _, rows = decode_record(item.record, item.key, verify=False)  # the resolver checked it
    return rows[0] if item.merge == 1 and item.grid == (1, 1) else rows.view(*item.merged, -1)


def _embedding(index: int, tensor: torch.Tensor, form: str) -> dict[str, Any]:
    flat = tensor.float().flatten()
    values = base64.b64encode(flat.numpy().tobytes()).decode() if form == "base64" else flat.tolist()
    return {"object": "embedding", "index": index, "embedding": values, "shape": list(tensor.shape)}


def _notes(request: EmbeddingRequest, items: Sequence[VisionItem]) -> dict[str, str]:
    """Metadata: files with equal fingerprints can be compared."""
    namespace = Namespace.of(items[0].key)
    return {"model": request.model, "tower": namespace.tower, "preprocess": namespace.preprocess}
