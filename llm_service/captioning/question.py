"""What a captioning job asks: prompts, system prompt, sampling; and the identity that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from llm_service.captioning.rows import Row
from llm_service.captioning.templates import Template
from llm_service.sampling import SamplingOptions
from shared.errors import CheckpointError, ConfigError
from shared.shards import fingerprint

#: files of a checkpoint up to this size are hashed whole, of larger ones samples
_WHOLE = 4 << 20
_SAMPLES, _SAMPLE = 64, 4096


@dataclass(frozen=True)
class Question:
    """What is asked about every picture.

    Attributes:
        prompts: templates, each asked by itself.
        system: template of the system prompt; None for none.
        sampling: how to answer; one answer each.
    """

    prompts: tuple[Template, ...]
    system: Template | None
    sampling: SamplingOptions

    @staticmethod
    def parse(prompts: Sequence[str], system: str | None, sampling: SamplingOptions) -> Question:
        """Reads the templates.

        Raises:
            ConfigError: no prompt, a bad template, or more than one answer per prompt.
        """
        if not prompts:
            raise ConfigError("give at least one prompt")
        if sampling.n != 1:
            raise ConfigError("a caption job takes one answer per prompt; give several prompts, or run several jobs")
        templates = tuple(Template.parse(text) for text in prompts)
        return Question(templates, None if system is None else Template.parse(system), sampling)

    def check(self, fields: frozenset[str] | None) -> None:
        """Compares the templates with the fields of a source.

        Raises:
            ConfigError: a field that there is not.
        """
        for template in (*self.prompts, *([self.system] if self.system else [])):
            template.check(fields)

    def texts(self, row: Row) -> list[str]:
        """The prompts for a row.

        Raises:
            RequestError: the row lacks a field.
        """
        return [template.fill(row.fields) for template in self.prompts]

    def messages(self, row: Row, text: str) -> list[dict[str, Any]]:
        """The chat of one prompt: the picture first, in OpenAI's shape, its URL left out.

        Raises:
            RequestError: the row lacks a field of the system prompt.
        """
        user = {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": text}]}
        return [user] if self.system is None else [{"role": "system", "content": self.system.fill(row.fields)}, user]

    def identity(self) -> dict[str, Any]:
        """JSON values that name it in a job's fingerprint."""
        return {
            "prompts": [template.text for template in self.prompts],
            "system": None if self.system is None else self.system.text,
            "sampling": self.sampling.model_dump(mode="json", exclude_defaults=True),
        }

    @property
    def fingerprint(self) -> str:
        """Of prompts, system prompt and sampling; 32 hex digits."""
        return fingerprint(self.identity())


def checkpoint_fingerprint(folder: Path) -> str:
    """Tells checkpoints apart without reading all of them; 32 hex digits.

    Files up to 4 MiB (configuration, tokenizer, template) count whole, of larger ones the size, both ends and 64
    places between them: a model that was trained on differs everywhere.

    Raises:
        CheckpointError: nothing there to read.
    """
    hasher = blake3()
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md")
        if not files:
            raise CheckpointError(f"{folder} holds no checkpoint")
        for path in files:
            size = path.stat().st_size
            hasher.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                if size <= _WHOLE:
                    hasher.update(file.read())
                    continue
                for place in range(_SAMPLES + 1):
                    file.seek((size - _SAMPLE) * place // _SAMPLES)
                    hasher.update(file.read(_SAMPLE))
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint in {folder}: {error.strerror}") from error
    return hasher.hexdigest(16)
