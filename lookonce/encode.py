"""Features of a folder of pictures by an encoder that has no language model: one tensor per picture in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from encoder_service.checkpoints import LoadedEncoder, load_encoder
from encoder_service.device import Patches, pack, smallest_batch
from encoder_service.towers.base import Budget
from encoder_service.towers.packed import pack_weights
from encoder_service.towers.radio import RadioTower
from llm_service.captioning.sources.files import find_pictures
from lookonce.tensor_writer import TensorWriter
from shared import images
from shared.config import Dtype, ImageSettings, ModelSettings, load_settings
from shared.errors import CheckpointError, ConfigError, LookonceError
from shared.sizing import Grid

#: patches of one forward, at most; a larger picture goes alone
MAX_BATCH_PATCHES = 8192
#: threads that decode and preprocess, and pictures that they may be ahead of the tower
READERS, AHEAD = 2, 8


@dataclass
class Report:
    """What became of a folder.

    Attributes:
        encoded: pictures in the file.
        failures: path and reason of the others.
    """

    encoded: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)


def encoder_alone(checkpoint: Path | None, config: Path | None) -> ModelSettings:
    """The encoder that a command line names: a checkpoint with default settings, or a file's first model.

    Raises:
        ConfigError: both or none of them, or a file that cannot be used.
    """
    if (checkpoint is None) == (config is None):
        raise ConfigError("give the encoder's folder with --checkpoint, or a settings file with --config")
    if config is not None:
        return load_settings(config).models[0]
    assert checkpoint is not None
    return ModelSettings(name="encoder", checkpoint=checkpoint)


class _Picture(NamedTuple):
    name: str
    patches: Patches


def encode_folder(
    folder: Path,
    out: Path,
    checkpoint: Path,
    *,
    summary: bool,
    dtype: Dtype,
    device: str,
    progress: Callable[[int, int, int], None],
) -> Report:
    """Encodes every picture below ``folder`` into a safetensors file.

    The tensors are named by the pictures' paths below the folder: features ``[rows, columns, width]``, one per
    patch, or a summary ``[values]``. The file appears whole or not at all.

    Args:
        folder: searched with its subfolders.
        out: file to write; replaced if it exists.
        checkpoint: folder of an encoder without a language model.
        summary: one vector per picture instead of one per patch.
        dtype, device: of the tower; the tensors have this dtype.
        progress: called with (done, total, failed).

    Raises:
        ConfigError: no pictures, or an output that cannot be written.
        CheckpointError: the checkpoint cannot be used.
    """
    paths = find_pictures(folder)
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out} must end in .safetensors")
    loaded = load_encoder(checkpoint, dtype, device)
    if not isinstance(loaded.tower, RadioTower) or loaded.tower.config.projector != "none":
        raise CheckpointError(f"{checkpoint} is a chat model; encode takes encoders alone, serve takes this one")
    pack_weights(loaded.tower)
    report = Report()
    what = "summary" if summary else "features"
    prints = loaded.fingerprints
    notes = {"what": what, "tower": prints.tower, "preprocess": prints.preprocess}
    try:
        with TensorWriter(out, notes) as writer:
            for batch in _batches(_read(folder, paths, loaded, report)):
                results = _forward(loaded.tower, [picture.patches for picture in batch], summary=summary)
                for picture, values in zip(batch, results, strict=True):
                    writer.add(picture.name, values)
                report.encoded += len(batch)
                progress(report.encoded + len(report.failures), len(paths), len(report.failures))
            if not report.encoded:
                raise ConfigError(f"none of the {len(paths)} pictures could be read; first: {report.failures[0][1]}")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from error
    progress(len(paths), len(paths), len(report.failures))
    return report


def _read(folder: Path, paths: list[Path], loaded: LoadedEncoder, report: Report) -> Iterator[_Picture]:
    """Pictures in order, preprocessed a few ahead; those that cannot be read go into the report."""
    limits = ImageSettings()
    dtype = next(loaded.tower.parameters()).dtype

    def read(path: Path) -> Patches:
        if path.stat().st_size > limits.max_bytes:
            raise ConfigError(f"more than {limits.max_bytes} bytes")
        values, grid = loaded.preprocess.patches(torch.from_numpy(images.decode(path.read_bytes(), limits)))
        return Patches(values.to(dtype), grid)

    with ThreadPoolExecutor(READERS, thread_name_prefix="reader") as pool:
        todo = iter(paths)
        window: list[tuple[Path, Future[Patches]]] = []
        try:
            while True:
                window += [(path, pool.submit(read, path)) for path in islice(todo, AHEAD - len(window))]
                if not window:
                    return
                path, future = window.pop(0)
                name = path.relative_to(folder).as_posix()
                try:
                    patches = future.result()
                except (LookonceError, OSError) as error:
                    report.failures.append((name, getattr(error, "message", None) or str(error)))
                    continue
                yield _Picture(name, patches)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _batches(pictures: Iterator[_Picture]) -> Iterator[list[_Picture]]:
    """Neighbours that fit into one forward."""
    batch: list[_Picture] = []
    patches = 0
    for picture in pictures:
        size = picture.patches.grid.patches
        if batch and patches + size > MAX_BATCH_PATCHES:
            yield batch
            batch, patches = [], 0
        batch.append(picture)
        patches += size
    if batch:
        yield batch


@torch.inference_mode()
def _forward(tower: RadioTower, batch: list[Patches], *, summary: bool) -> list[torch.Tensor]:
    """Per picture, on the host: features ``[rows, columns, width]`` or a summary ``[values]``."""
    grids: list[Grid] = [patches.grid for patches in batch]
    used = sum(grid.patches for grid in grids)
    budget = Budget(max(used, smallest_batch(tower)), len(batch))
    parameter = next(tower.parameters())
    packed = torch.zeros(budget.patches, tower.patch_dim, dtype=parameter.dtype)
    pack(batch, packed)
    out = tower.encode(packed.to(parameter.device), tower.plan(grids, budget).to(parameter.device))
    if summary:
        return list(out.summary.cpu()[: len(batch)])
    rows = torch.split(out.features.cpu()[:used], [grid.patches for grid in grids])
    return [values.view(grid.height, grid.width, -1) for values, grid in zip(rows, grids, strict=True)]
