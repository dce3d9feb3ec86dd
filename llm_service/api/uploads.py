"""``/v1/images``: pictures sent ahead, encoded in the background, named by their hash afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from llm_service.api.access import Tenant
from llm_service.api.chat import ImageService
from llm_service.api.vision import NAMED, unknown_image
from shared.errors import Busy, LookonceError
from shared.items import VisionItem
from shared.keys import file_hash

logger = logging.getLogger(__name__)

#: encodes that uploads may have under way in one ingress
MAX_BACKGROUND = 64
#: failures that are remembered, to be told to who asks
MAX_FAILURES = 1024


@dataclass(frozen=True)
class Upload:
    """One picture of one tenant for one model."""

    model: str
    salt: str | None
    name: str


class Uploads:
    """Encodes of pictures that nobody waits for yet."""

    def __init__(self) -> None:
        self._running: dict[Upload, asyncio.Task[None]] = {}
        self._failures: OrderedDict[Upload, str] = OrderedDict()

    async def close(self) -> None:
        """Cancels what still runs."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def add(self, model: str, service: ImageService, data: bytes, tenant: Tenant) -> dict[str, Any]:
        """Checks a picture and starts encoding it, unless the cache has it or another upload is at it.

        Returns:
            What :meth:`describe` tells, with the picture's size.

        Raises:
            BadImage, ImageTooLarge: the file cannot be used.
            Busy: too many uploads are being encoded.
        """
        image = service.images.uploaded(data)
        name = await asyncio.to_thread(file_hash, data)
        upload = Upload(model, tenant.salt, name)
        item = await service.images.look_up(name, tenant.salt)
        if item is None and upload not in self._running:
            if len(self._running) >= MAX_BACKGROUND:
                raise Busy(f"{MAX_BACKGROUND} uploads are being encoded, which is the limit; try again in a moment")
            self._failures.pop(upload, None)
            task = asyncio.create_task(self._encode(upload, service, data))
            self._running[upload] = task
            task.add_done_callback(lambda _: self._running.pop(upload, None))
        size = {"width": image.header.width, "height": image.header.height, "bytes": len(data)}
        return _body(upload, "encoding" if item is None else "cached", image.merged(service.rule).patches) | size

    async def describe(self, model: str, service: ImageService, name: str, tenant: Tenant) -> dict[str, Any]:
        """What is known of a picture: ``cached``, ``encoding``, or ``failed`` with the reason.

        Raises:
            UnknownImage: nothing. Another tenant's picture looks like one that nobody ever sent.
        """
        item: VisionItem | None = await service.images.look_up(name, tenant.salt)
        upload = Upload(model, tenant.salt, name)
        if item is not None:
            return _body(upload, "cached", item.tokens)
        if upload in self._running:
            return _body(upload, "encoding", None)
        if upload in self._failures:
            return _body(upload, "failed", None) | {"error": self._failures[upload]}
        raise unknown_image(NAMED + name)

    async def purge(self, model: str, service: ImageService, name: str, tenant: Tenant) -> dict[str, Any]:
        """Deletes a picture's embedding from the cache, and stops its encode if one runs.

        Raises:
            UnknownImage: as for :meth:`describe`.
        """
        upload = Upload(model, tenant.salt, name)
        if (task := self._running.get(upload)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        failed = self._failures.pop(upload, None) is not None
        purged = await service.images.purge(name, tenant.salt)
        if not purged and task is None and not failed:
            raise unknown_image(NAMED + name)
        return {"id": NAMED + name, "object": "image", "deleted": True}

    async def _encode(self, upload: Upload, service: ImageService, data: bytes) -> None:
        try:
            await service.images.encode_named(data, upload.name, upload.salt)
        except LookonceError as error:
            logger.warning("an uploaded image could not be encoded: %s", error.message)
            self._failures[upload] = error.message
            while len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)


def _body(upload: Upload, state: str, tokens: int | None) -> dict[str, Any]:
    return {
        "id": NAMED + upload.name,
        "object": "image",
        "hash": upload.name,
        "model": upload.model,
        "state": state,
        "tokens": tokens,
    }
