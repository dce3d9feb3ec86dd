"""The one error tree. Every error that may reach a caller has a status, a stable code and a sentence that helps.

LookonceError
├── RequestError (400)        the caller can mend it
│   ├── BadImage, ImageTooLarge, TooManyImages, FetchFailed, ContextTooLong
│   ├── Unauthorized (401)
│   ├── UnknownModel, UnknownImage, UnknownFile, UnknownBatch (404)
│   ├── Conflict (409)
│   ├── PayloadTooLarge (413)
│   └── QuarantinedImage (422)
├── Busy (429)                try again after ``retry_after`` seconds
├── Unavailable (503)         a pool or a dependency is down; likewise
│   └── ReplicaLost           the process that worked on the request died; the ingress asks another one
├── DeadlineExceeded (504)
├── EmbeddingLost (internal)  an entry vanished between the check and its use: encode again
├── StorageError (507)        a disk that is full or broken; what was written before is whole
├── InUse (409)               somebody else works on the same files
├── CheckpointError           a checkpoint that cannot be loaded; names the file and the tensor
└── ConfigError               a setting that cannot be used; names it
"""

from __future__ import annotations


class LookonceError(Exception):
    """Base of all errors of this project.

    Args:
        message: one sentence for the caller: what is wrong and what to do.
        param: the request field at fault, as OpenAI's error shape names it.
    """

    status = 500
    code = "internal_error"
    #: OpenAI's coarse class of the error
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        # errors cross process borders; the keyword arguments travel in the instance's dictionary
        return (self.__class__, (self.message,), self.__dict__)


class RequestError(LookonceError):
    """The request is at fault; sending it again unchanged will not help."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class BadImage(RequestError):
    """Not a picture, damaged, or of a kind that is not accepted."""

    code = "bad_image"


class ImageTooLarge(RequestError):
    """More bytes, pixels or frames than allowed."""

    code = "image_too_large"


class TooManyImages(RequestError):
    """More images in one request than allowed."""

    code = "too_many_images"


class FetchFailed(RequestError):
    """An image URL that could not be read, or may not be."""

    code = "image_fetch_failed"


class ContextTooLong(RequestError):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """A model name that this service does not serve."""

    status = 404
    code = "model_not_found"


class UnknownImage(RequestError):
    """An image named by its hash whose embedding is not in the cache."""

    status = 404
    code = "image_not_found"


class UnknownFile(RequestError):
    """A file that this tenant does not have."""

    status = 404
    code = "file_not_found"


class UnknownBatch(RequestError):
    """A batch that this tenant does not have."""

    status = 404
    code = "batch_not_found"


class Conflict(RequestError):
    """It is in a state in which this cannot be done."""

    status = 409
    code = "conflict"


class Unauthorized(RequestError):
    """No API key, or one that this service does not know."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class PayloadTooLarge(RequestError):
    """A request body above the limit."""

    status = 413
    code = "payload_too_large"


class QuarantinedImage(RequestError):
    """An image whose encoding ended a process more than once; it is refused for a while."""

    status = 422
    code = "image_quarantined"


class RetryableError(LookonceError):
    """The service is at fault, for now.

    Args:
        message: as in the base class.
        retry_after: seconds after which a retry makes sense.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Busy(RetryableError):
    """Queues are full."""

    status = 429
    code = "busy"
    kind = "rate_limit_error"


class Unavailable(RetryableError):
    """A pool or a dependency cannot answer now."""

    status = 503
    code = "unavailable"
    kind = "service_unavailable_error"


class ReplicaLost(Unavailable):
    """The process that worked on the request died, or its engine did. Another one may do it from the beginning."""


class DeadlineExceeded(LookonceError):
    """The request took longer than its deadline."""

    status = 504
    code = "deadline_exceeded"
    kind = "timeout_error"


class EmbeddingLost(LookonceError):
    """An embedding vanished between its check and its use; the ingress encodes the image again.

    Args:
        message: as in the base class.
        keys: cache keys of the lost entries.
    """

    status = 503
    code = "embedding_lost"

    def __init__(self, message: str, *, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class StorageError(LookonceError):
    """A disk that is full or broken."""

    status = 507
    code = "storage"


class InUse(LookonceError):
    """Another process works on the same files."""

    status = 409
    code = "in_use"


class CheckpointError(LookonceError):
    """A checkpoint that cannot be used."""

    code = "bad_checkpoint"


class ConfigError(LookonceError):
    """A configuration that cannot be used."""

    code = "bad_config"
