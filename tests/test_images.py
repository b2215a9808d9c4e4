"""The recipes of image classification: timm's augmentation, mixup, averages of weights and layer decay; ReaL labels."""

import json
import os
import signal
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from runs import killed_run, tiny
from torch import nn

from weft.lab import loop
from weft.lab.checkpoint import read
from weft.lab.data import Ahead
from weft.lab.evaluate import evaluate_run
from weft.lab.optim import layer_groups
from weft.lab.run import Run
from weft.lab.saving import saved_weights
from weft.tasks import TaskData, augment, get_task, make_config

pytest.importorskip("timm")
TASK = "imagefolder"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part in ("train", "val", "test"):
        for number, name in enumerate(("dark", "light")):
            (place / part / name).mkdir(parents=True)
            for i in range(10):
                pixels = random.integers(0, 100, (16, 16, 3), np.uint8) + 100 * number
                Image.fromarray(pixels.astype(np.uint8)).save(place / part / name / f"{i}.png")
    return place


def pictures(count=8, side=16):
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipe", ["color", "rand-m9-mstd0.5-inc1"])
def test_augmentation_is_timms_and_depends_only_on_the_generator(recipe):
    images = pictures()
    kept = torch.get_rng_state()
    first, again = (augment.augmenting(images, recipe, torch.Generator().manual_seed(2))() for _ in range(2))
    assert torch.equal(first, again) and first.dtype == torch.uint8 and first.shape == images.shape
    assert torch.equal(torch.get_rng_state(), kept)
    assert not torch.equal(first, augment.augmenting(images, recipe, torch.Generator().manual_seed(3))())
    seeds = torch.randint(augment.SEEDS, (8,), generator=torch.Generator().manual_seed(2)).tolist()
    one = augment.transformed(images[5:6].numpy(), seeds[5:6], recipe)  # each image has its own seed
    assert np.array_equal(one[0], first[5].numpy())


def test_worker_processes_give_the_same_images_also_after_one_is_killed(monkeypatch):
    images = pictures(32)
    alone = augment.augmenting(images, "rand-m9", torch.Generator().manual_seed(0))()
    monkeypatch.setattr(augment, "IN_PROCESS", 8)
    monkeypatch.setattr(augment, "cpus", lambda: 2)  # one for a worker
    try:
        started = [augment.augmenting(images, "rand-m9", torch.Generator().manual_seed(n)) for n in (0, 1)]
        assert torch.equal(started[0](), alone) and not torch.equal(started[1](), alone)
        pool = augment.workers(1)
        (worker,) = pool._processes
        for signal_sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # the first two stop the run, which saves
            os.kill(worker, signal_sent)
            again = augment.augmenting(images, "rand-m9", torch.Generator().manual_seed(0))
            assert torch.equal(again(), alone)
            assert (augment.workers(1) is pool) == (signal_sent != signal.SIGKILL)
    finally:
        augment.workers(1).shutdown()
        augment.workers.cache_clear()


def test_augmentation_explains_workers_that_end_twice(monkeypatch):
    class Pool:
        def submit(self, *work):
            future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(augment, "workers", lambda count: Pool())
    monkeypatch.setattr(augment, "cpus", lambda: 2)
    started = augment.augmenting(pictures(augment.IN_PROCESS), "rand-m9", torch.Generator())
    with pytest.raises(RuntimeError, match="ended twice.*memory"):
        started()


def test_each_batch_is_started_once_and_one_ahead():
    started = []
    ahead = Ahead(lambda number: started.append(number) or (lambda: (number, len(started))))
    assert [ahead(number) for number in (0, 1, 7, 8)] == [(0, 2), (1, 3), (7, 5), (8, 6)]
    assert started == [0, 1, 2, 7, 8, 9]


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0)])
def test_the_mixed_loss_is_timms(mixup, cutmix):
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy

    images, label = pictures(), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    batch = augment.mixed({"image": images, "label": label}, mixup, cutmix, torch.Generator().manual_seed(5))
    with augment.own_random_numbers() as seed:
        seed(5)
        theirs, target = Mixup(mixup, cutmix, label_smoothing=0.1, num_classes=5)(images.float() / 255, label)
    assert torch.equal(batch["image"], theirs) and 0 < batch["share"][0] < 1

    class Model(nn.Module):
        def forward(self, image):
            return image.mean((2, 3)) @ torch.linspace(-3, 3, 15).view(3, 5)

    config = make_config("imagefolder", label_smoothing=0.1, mixup=mixup, cutmix=cutmix)
    ours = get_task("imagefolder").loss(Model(), batch, config)
    torch.testing.assert_close(ours, SoftTargetCrossEntropy()(Model()(theirs), target))


def test_a_run_with_an_average_is_tested_on_it_and_resumes_exactly(tmp_path, folder, monkeypatch):
    settings = dict(
        data=str(folder), image_size=16, patch=4, batch_size=4, ema=0.8, layer_decay=0.5, mixup=0.5, drop_path=0.2,
        augmentation="rand-m5-n2-p1", learning_rate=0.01, steps=6, eval_every=3, test_on="last",
    )  # fmt: skip
    whole = loop.train(tiny(tmp_path / "whole", TASK, **settings))
    config = tiny(tmp_path / "killed", TASK, **settings)
    killed_run(monkeypatch, config, 5)
    assert loop.train(config, resume=True).test == whole.test
    a, b = (read(tmp_path / name / "checkpoints/step-00000006.safetensors")[0] for name in ("whole", "killed"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    # The average by hand: e ← 0.8 e + 0.2 w, from the weights after the first update.
    steps = [read(tmp_path / f"whole/checkpoints/step-0000000{n}.safetensors")[0] for n in (4, 6)]
    assert not torch.equal(a["average/head.weight"], a["model/head.weight"])
    assert (a["average/head.weight"] - steps[0]["average/head.weight"]).abs().max() > 0
    assert torch.equal(saved_weights(Run(tmp_path / "whole"), "last")[0]["model/head.weight"], a["average/head.weight"])
    assert evaluate_run(tmp_path / "whole")[0] == whole.test


def test_a_gallery_shows_the_average_that_is_tested(tmp_path, folder, monkeypatch):
    shown = []
    task = get_task("imagefolder")
    monkeypatch.setattr(task, "draws", True, raising=False)
    monkeypatch.setattr(task, "galleries", lambda model, *_: shown.append(model.head.weight.clone()) or [])
    settings = dict(data=str(folder), image_size=16, batch_size=4, steps=4, eval_every=0, ema=0.9, test_on="last")
    loop.train(tiny(tmp_path / "run", TASK, **settings))
    tested = saved_weights(Run(tmp_path / "run"), "last")[0]["model/head.weight"]
    assert torch.equal(shown[0], tested)


def test_the_average_is_the_recursion(tmp_path, folder):
    settings = dict(data=str(folder), image_size=16, batch_size=4, steps=4, checkpoint_every=1, keep=4, eval_every=0)
    loop.train(tiny(tmp_path / "run", TASK, **settings, ema=0.7))
    saved = [read(tmp_path / f"run/checkpoints/step-0000000{n}.safetensors")[0] for n in (1, 2, 3, 4)]
    average = saved[0]["model/head.weight"]
    for tensors in saved[1:]:
        average = 0.7 * average + 0.3 * tensors["model/head.weight"]
    torch.testing.assert_close(saved[-1]["average/head.weight"], average)


def test_another_image_size_for_timm_is_an_error(folder):
    options = {"model": "timm:vit_tiny_patch16_224", "model_options": '{"img_size": 32}'}
    task, config = get_task(TASK), make_config(TASK, data=str(folder), image_size=16, **options)
    with pytest.raises(ValueError, match="img_size is 32, but the task's images have 16 x 16 pixels"):
        task.model(config, task.load(config))


@pytest.mark.parametrize("model", ["transformer", "timm:vit_tiny_patch16_224", "pvt-tiny", "crate-tiny"])
def test_layer_decay_scales_every_layer_by_the_one_after_it(model):
    sizes = {"transformer": {"layers": 3}, "timm:vit_tiny_patch16_224": {"model_options": '{"depth": 3}'}}
    config = make_config("cifar10", model=model, image_size=32, layer_decay=0.5, **sizes.get(model, {}))
    facts = {"classes": 10, "size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    network = get_task("cifar10").model(config, TaskData({}, {}, {}, 64, facts))
    groups = layer_groups(network, config)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert len(scale) == len(list(network.parameters()))
    inner = getattr(network, "model", network)
    assert scale[id(inner.head.weight)] == 1
    blocks = [*inner.block1, *inner.block2, *inner.block3, *inner.block4] if "pvt" in model else list(inner.blocks)
    scales = [{scale[id(p)] for p in block.parameters()} for block in blocks]
    assert scales == [{0.5 ** (len(blocks) - i)} for i in range(len(blocks))]
    assert min(scale.values()) == 0.5 ** (len(blocks) + 1)
    if "pvt" in model:  # the class token belongs to the last stage
        assert scale[id(inner.cls_token)] == scale[id(inner.pos_embed4)]


def test_settings_that_cannot_work_are_refused():
    for wrong, message in (
        (dict(mixup=0.5, batch_size=3), "even batch_size"),
        (dict(drop_path=0.1, model="crate"), "no branch to drop"),
        (dict(pooling="first"), "pooling must be mean or cls"),
        (dict(positions="rope"), "positions must be learned or sinusoid"),
        (dict(augment=False, augmentation="color"), "mutually exclusive"),
        (dict(augmentation="rnad-m9"), "augmentation must be color or a name of timm's.*'rnad-m9'"),
        (dict(ema=0.9, test_on="average"), "ema does not support"),
        (dict(layer_decay=0.0), "layer_decay must be"),
    ):
        with pytest.raises(ValueError, match=message):
            make_config("cifar10", **wrong)
    with pytest.raises(ValueError, match="mixup has no effect"):
        make_config("listops", mixup=0.5)


def test_real_labels_are_read_in_the_makers_order(tmp_path):
    """ImageNet-ReaL: a list of label sets, by the number in the name of a validation image."""
    from weft.tasks.imagenet import StoredImages

    place = tmp_path / "imagenet"
    for part in ("train", "val"):
        for name in ("n01", "n02", "n03"):
            (place / part / name).mkdir(parents=True)
    for i in range(9):
        Image.new("RGB", (32, 32), (20 * i, 0, 0)).save(place / f"train/n0{i % 3 + 1}/{i}.jpg")
        Image.new("RGB", (32, 32), (0, 20 * i, 0)).save(place / f"val/n0{i % 3 + 1}/ILSVRC2012_val_{i + 1:08d}.png")
    sets = [[i % 3, (i + 1) % 3] if i % 2 else [] for i in range(9)]
    (place / "real.json").write_text(json.dumps(sets))
    task: StoredImages = get_task("imagenet")
    config = make_config("imagenet", data=str(tmp_path), image_size=32, batch_size=3)
    data = task.read(config, None)
    number = data.test["image"][:, 1].float().mean((1, 2)).div(20).round().long()
    for i, labels in zip(number.tolist(), data.test["real"].tolist(), strict=True):
        assert sorted(x for x in labels if x >= 0) == sorted(sets[i])

    class Model(nn.Module):
        def forward(self, image):  # always one class after the truth
            return F.one_hot((image[:, 1].float().mean((1, 2)).div(20).round().long() + 1) % 3, 3).float()

    sums = {name: float(values.float().sum()) for name, values in task.score(Model(), data.test).items()}
    found = task.summary(sums)
    assert found["accuracy"] == 0 and found["real"] == 1
    (place / "real.json").write_text(json.dumps([*sets, [999]]))  # the classes here are not all of ImageNet's
    with pytest.raises(Exception, match="real.json.*the label 999, but there are 3 classes"):
        task.read(config, None)
    (place / "real.json").write_text(json.dumps(sets[:4]))
    with pytest.raises(Exception, match="real.json.*label sets"):
        task.read(config, None)


def test_weights_for_other_classes_keep_the_body_and_other_sizes_are_refused():
    def model(size, classes):
        config = make_config("imagefolder", image_size=size, layers=1, dim=16, heads=2, head_dim=8, mlp_dim=16)
        facts = {"size": size, "classes": classes, "mean": [0.5] * 3, "std": [0.5] * 3}
        return task.model(config, TaskData({}, {}, {}, (size // 4) ** 2, facts))

    task = get_task("imagefolder")
    first, second = model(16, 5), model(16, 3)
    assert task.begin(second, first.state_dict())
    assert torch.equal(second.embed.weight, first.embed.weight)
    with pytest.raises(ValueError, match=r"use its --image-size.*positions.*\[16, 16\]"):
        task.begin(model(32, 3), first.state_dict())
