"""The settings of the wide-attention study: four tasks, ten attentions, and models built from them by name.

Wide Attention Is The Way Forward For Transformers?, https://arxiv.org/abs/2210.00640, Tables 1 and 7 and its code
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..attention import attention_info
from .build import AttentionChoice
from .classifier import TextClassifier
from .matcher import TextMatcher


@dataclass(frozen=True)
class Task:
    """The study's fixed settings for a task; only layers × heads varies."""

    vocab: int
    classes: int
    length: int  # longest document, without the CLS token
    dim: int
    head_dim: int
    mlp_dim: int
    shapes: tuple[tuple[int, int], ...]  # (layers, heads), from the deepest to the widest
    steps: int  # training steps at batch 32
    warmup: int
    pairs: bool = False  # the task compares two documents

    @property
    def deepest(self) -> tuple[int, int]:
        return self.shapes[0]

    @property
    def widest(self) -> tuple[int, int]:
        return self.shapes[-1]


_TEXT: dict[str, Any] = dict(dim=512, head_dim=64, mlp_dim=2048, shapes=((6, 8), (3, 16), (2, 24), (1, 48)))

TASKS: dict[str, Task] = {
    # The study's tokeniser is not published; its printed sizes allow vocabularies of 93 909 to 93 960 words.
    "imdb-token": Task(vocab=93_935, classes=2, length=500, steps=30_000, warmup=8_000, **_TEXT),
    "imdb-byte": Task(vocab=257, classes=2, length=1000, steps=30_000, warmup=8_000, **_TEXT),
    "listops": Task(vocab=17, classes=10, length=2000, steps=10_000, warmup=1_000, **_TEXT),
    "matching": Task(
        vocab=257,
        classes=2,
        length=4000,
        dim=128,
        head_dim=32,
        mlp_dim=512,
        shapes=((4, 4), (2, 8), (1, 16)),
        steps=10_000,
        warmup=8_000,
        pairs=True,
    ),
}

STUDY_ATTENTIONS = (
    "bigbird",
    "full",
    "linear",
    "linformer",
    "local",
    "longformer",
    "performer",
    "sinkhorn",
    "sparse",
    "synthesizer",
)
# Without sinkhorn, which has no CLS token, and full attention, which would make the mixture quadratic.
MIXED = tuple(name for name in STUDY_ATTENTIONS if name not in ("full", "sinkhorn"))
NO_ATTENTION_DROPOUT = ("bigbird", "linear")  # as in the published code
ONLY_WITH = {"features": ("kernel", "softmax"), "leading_column": ("pattern", "fixed")}  # other values reject them


def study_options(task: str, attention: str) -> dict[str, Any]:
    """The mechanism's options in the study; none if the study does not use it."""
    _task(task)
    text = task.startswith("imdb")
    return {
        "bigbird": {"block_size": 64, "random_blocks": 3},
        "linformer": {"rank": 16},
        "local": {"block_size": 50},
        "longformer": {"window": 512},
        "performer": {"kernel": "softmax", "features": 2} if task == "listops" else {"kernel": "relu"},
        "sinkhorn": {"block_size": 20},
        "sparse": {
            "pattern": "fixed",
            "block_size": 50,
            "columns": 10,
            "leading_column": True,
            "cls": True,
            "one_way": True,
        },
        "synthesizer": {"kind": "factorized", "rank": 32, "dot": not text},
    }.get(attention, {})


def lra(
    task: str, attention: str = "full", layers: int | None = None, heads: int | None = None, **options: Any
) -> TextClassifier | TextMatcher:
    """A model of the study: `lra("listops", "linformer", layers=1, heads=48)`.

    `task` is one of TASKS. `attention` is one of the study's ten, "mixed" (eight in every layer), or any other
    registered name with its default options. Layers and heads default to the study's deepest shape. `options` go to
    TextClassifier or TextMatcher and override the study's settings, including vocab and classes; `attention_options`
    are merged with the study's, without those that do not apply to the given kernel or pattern.
    """
    found = _task(task)
    if (layers is None) != (heads is None):
        raise ValueError("set both layers and heads, or neither for the deepest shape")
    if layers is None or heads is None:
        layers, heads = found.deepest
    own = dict(options.pop("attention_options", None) or {})
    choice: AttentionChoice = attention
    settings: dict[str, Any] = {}
    if attention == "mixed":
        if own:
            raise TypeError(
                "attention='mixed' takes no attention_options: use TextClassifier with a list of (name, {options})"
            )
        choice = [(name, study_options(task, name)) for name in MIXED]
    else:
        attention_info(attention)  # raises an error with suggestions for unknown names
        study = study_options(task, attention)
        for option, (kind, value) in ONLY_WITH.items():
            if own.get(kind, value) != value:
                study.pop(option, None)
        settings["attention_options"] = {**study, **own}
    if attention in NO_ATTENTION_DROPOUT:
        settings["attention_dropout"] = 0.0
    if attention == "sinkhorn":
        settings["pooling"] = "mean"
        if not found.pairs:
            settings["head_width"] = 0
    elif found.pairs:
        settings["pooling"] = "first"
    settings.update(
        dim=found.dim, head_dim=found.head_dim, mlp_dim=found.mlp_dim, layers=layers, heads=heads, attention=choice
    )
    settings.update(options)
    with_cls = settings.get("pooling", "cls") == "cls"
    settings.setdefault("max_length", found.length + with_cls)
    if attention == "bigbird":  # the pattern of padded documents, for packed ones too
        settings["attention_options"].setdefault("pattern_length", settings["max_length"])
    vocab, classes = settings.pop("vocab", found.vocab), settings.pop("classes", found.classes)
    model = TextMatcher if found.pairs else TextClassifier
    return model(vocab, classes, **settings)


def _task(name: str) -> Task:
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; the study has {', '.join(TASKS)}")
    return TASKS[name]
