"""``lookonce encode``: pictures to a file of features, against transformers' own model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import RadioModel
from typer.testing import CliRunner, Result

from encoder_service.checkpoints import load_encoder
from lookonce.cli import app
from lookonce.tensor_writer import TensorWriter
from tests.encoder_service.conftest import relative_error
from tests.encoder_service.test_preprocess import picture
from tools.checkpoints.radio import write_radio

SIZES = {"a.png": (40, 56), "sub/b.PNG": (200, 90), "sub/tiny 🎈.png": (3, 2), "c.png": (128, 128)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_radio(tmp_path_factory.mktemp("radio"), "native")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(*size)).save(folder / name)
    return folder


def encode(folder: Path, out: Path, checkpoint: Path, *more: str) -> Result:
    words = ["encode", str(folder), "--out", str(out), "--checkpoint", str(checkpoint), *more]
    return CliRunner().invoke(app, words)


@torch.inference_mode()
def test_features_and_summaries_equal_transformers_from_the_picture_on(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Its normalisation is inside the model; the resize is the one that RADIO's authors publish."""
    for flag in ("--features", "--summary"):
        run = encode(folder, tmp_path / f"{flag}.safetensors", checkpoint, flag)
        assert run.exit_code == 0, run.output
        assert "4 pictures" in run.output
    features, summaries = (load_file(tmp_path / f"{flag}.safetensors") for flag in ("--features", "--summary"))
    assert features.keys() == summaries.keys() == SIZES.keys()
    model = RadioModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for name, (width, height) in SIZES.items():
        pixels = torch.from_numpy(picture(width, height)).permute(2, 0, 1)[None].float() / 255
        rows, columns = features[name].shape[:2]
        scale = min(1, 128 / max(width, height))  # the table was made for 128 pixels
        assert abs(rows - height * scale / 8) <= 1
        assert abs(columns - width * scale / 8) <= 1
        out = model(F.interpolate(pixels, size=(rows * 8, columns * 8), mode="bilinear", align_corners=False))
        assert relative_error(features[name].flatten(0, 1), out.features[0]) <= 1e-5
        assert relative_error(summaries[name], out.summary[0]) <= 1e-5


def test_failed_files_are_listed_and_the_others_written(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    (folder / "broken.jpg").write_bytes(b"no picture")
    (folder / "sub" / "cut.png").write_bytes((folder / "c.png").read_bytes()[:2000])
    out = tmp_path / "f.safetensors"
    run = encode(folder, out, checkpoint, "--dtype", "bfloat16")
    assert run.exit_code == 3, run.output
    assert "broken.jpg: " in run.output
    assert "sub/cut.png: " in run.output
    assert "4 pictures" in run.output
    tensors = load_file(out)
    assert tensors.keys() == SIZES.keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    prints = load_encoder(checkpoint, "bfloat16").fingerprints
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"what": "features", "tower": prints.tower, "preprocess": prints.preprocess}


def test_what_cannot_work_says_so_and_writes_nothing(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    chat = write_radio(tmp_path / "chat", "llama")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.png").write_bytes(b"no picture")
    results = tmp_path / "results"
    results.mkdir()
    out = results / "f.safetensors"
    for run, words in (
        (encode(folder, out, chat), "chat model"),
        (encode(tmp_path / "missing", out, checkpoint), "not a folder"),
        (encode(folder, results / "f.npz", checkpoint), "must end in .safetensors"),
        (encode(broken, out, checkpoint), "none of the 1 pictures"),
        (encode(folder, tmp_path / "nowhere" / "f.safetensors", checkpoint), "cannot write"),
        (encode(folder, out, tmp_path / "no checkpoint"), "config.json"),
        (encode(folder, out, checkpoint, "--config", "x.yaml"), "--checkpoint, or a settings file"),
    ):
        assert run.exit_code == 1, run.output
        assert words in " ".join(run.output.split()), run.output
        assert "Traceback" not in run.output
    assert not list(results.iterdir())


def test_a_settings_file_names_folder_and_dtype(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "encoder.yaml", tmp_path / "f.safetensors"
    config.write_text(f"models: [{{name: e, checkpoint: '{checkpoint}', encoder: {{dtype: bfloat16}}}}]\n")
    run = CliRunner().invoke(app, ["encode", str(folder), "--out", str(out), "--config", str(config)])
    assert run.exit_code == 0, run.output
    assert {tensor.dtype for tensor in load_file(out).values()} == {torch.bfloat16}


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    with TensorWriter(path, {"a": "b"}) as writer:
        writer.add("x", torch.arange(6.0).view(2, 3))
        writer.add("empty", torch.zeros(0, 3))
    with pytest.raises(ValueError, match="named x"), TensorWriter(path, {}) as writer:
        writer.add("x", torch.zeros(1))
        writer.add("x", torch.zeros(1))
    tensors = load_file(path)
    assert torch.equal(tensors["x"], torch.arange(6.0).view(2, 3))
    assert tensors["empty"].shape == (0, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
