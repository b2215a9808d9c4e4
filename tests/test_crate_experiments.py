"""The experiments run, on a few made-up images in the makers' layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "experiments" / "crate"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("common", "cifar10", "mae"):
        sys.modules.pop(name, None)


@pytest.fixture
def images(tmp_path):
    """24 training and 8 test images of two kinds, bright and dark, in cifar-10-batches-bin."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, count in {**{f"data_batch_{i}": 8 for i in range(1, 6)}, "test_batch": 8}.items():
        labels = np.arange(count) % 2
        pixels = generator.integers(0, 100, (count, 3072)) + 150 * labels[:, None]
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).astype(np.uint8).tobytes())
    return tmp_path


def run(monkeypatch, module, *arguments: str) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    module.main()
    torch.set_num_threads(threads)


def test_cifar10_trains_both_models_and_repeats_itself(monkeypatch, scripts, images, tmp_path):
    pytest.importorskip("timm")
    import cifar10

    small = ["--data", str(images), "--steps", "12", "--batch", "8", "--dim", "32", "--layers", "2", "--measure", "4"]
    small += ["--lr", "2e-3", "--no-compile"]
    for out in ("a", "b"):
        models = ["crate", "vit"] if out == "a" else ["crate"]
        run(monkeypatch, cifar10, *small, "--out", str(tmp_path / out), "--models", *models)
    first, again = (json.loads((tmp_path / out / "result.json").read_text()) for out in ("a", "b"))
    assert first["crate"]["loss"] == again["crate"]["loss"]
    for name in ("crate", "vit"):
        losses = first[name]["loss"]
        assert sum(losses[-3:]) < sum(losses[:3]) and first[name]["steps"] == 12
        assert (tmp_path / "a" / f"{name}.safetensors").exists()
    assert '"checkpoint": "step 12"' in (tmp_path / "a" / "crate.html").read_text("utf-8")


def test_equal_sizes(scripts):
    pytest.importorskip("timm")
    import argparse

    import cifar10

    options = argparse.Namespace(dim=384, layers=12)
    counts = [sum(p.numel() for p in make(options).parameters()) for make in cifar10.MODELS.values()]
    assert max(counts) / min(counts) < 1.005


def test_masked_autoencoder_then_probe_then_finetune(monkeypatch, scripts, images, tmp_path):
    pytest.importorskip("torchvision")
    import mae

    small = ["--data", str(images), "--steps", "6", "--batch", "8", "--dim", "16", "--layers", "1", "--no-compile"]
    run(monkeypatch, mae, *small, "--out", str(tmp_path / "mae"))
    found = json.loads((tmp_path / "mae" / "result.json").read_text())
    assert found["pretrain"]["loss"][-1] < found["pretrain"]["loss"][0]
    assert 0 <= found["probe"]["test_accuracy"] <= 1 and 0 <= found["finetune"]["test_accuracy"] <= 1


def test_sheets_hold_the_same_images(scripts, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    import common

    images = np.random.default_rng(1).integers(0, 256, (40, 3, 32, 32), dtype=np.uint8)
    sheet = images.reshape(2, 20, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 640, 3)
    for name in ("train_0", "train_1", "test"):
        Image.fromarray(sheet).save(tmp_path / f"{name}.webp", lossless=True)
    np.save(tmp_path / "train_labels.npy", np.arange(80))
    np.save(tmp_path / "test_labels.npy", np.arange(40))
    (train, _), (test, labels) = common.read_sheets(tmp_path)
    assert np.array_equal(train, np.concatenate([images, images])) and np.array_equal(test, images)
    assert np.array_equal(labels, np.arange(40))
