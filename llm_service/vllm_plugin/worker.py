"""What we ask of vLLM's workers beyond vLLM's own calls (``worker_extension_cls``)."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into the worker class."""

    model_runner: Any

    def lookonce_parameter_names(self) -> list[str]:
        """Names of all parameters that this worker holds."""
        return [name for name, _ in self.model_runner.get_model().named_parameters()]
