"""What all sections of the settings tree have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: unknown keys are an error, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
