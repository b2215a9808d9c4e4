"""Use a trained model: `weft.load(run)`, its predictions, and its export to a folder that needs nothing else.

    model = weft.load("runs/classify-…")              # or an exported folder; no training data needed
    model.predict(["Lovely.", "Dull."])               # [{"answer": "pos", "probability": 0.93}, …]
    model.export("sentiment")                         # config, meaning of ids and labels, weights, model card

An exported folder has config.json, data.json, the vocabulary or tokenizer, model.safetensors and README.md. Models of
transformers and timm have their library's files instead, and these in weft/.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..adapt.ensemble import Members
from ..tasks import TaskData
from ..tasks.base import Known, Task, cut_note
from ..tasks.config import TrainConfig, from_json, portable, to_json
from ..tasks.files import new_folder
from ..tasks.hosts import host_of
from ..tasks.registry import task_of
from .build import build_model
from .hosted import OWN, load_host, save_host
from .kept import Kept, read_kept
from .run import MODEL, Run, missing_config
from .saving import saved_weights
from .say import say
from .state import restore_model


class Trained(nn.Module):
    """The model of a run in eval mode, with the meaning of its ids and labels."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, kept: Kept, step: int, test: dict[str, float], commit: str = ""
    ):
        super().__init__()
        self.model, self.config, self.kept, self.step, self.test = model, config, kept, step, test
        self.commit = commit  # of the code that trained it
        self.eval()

    @property
    def task(self) -> Task:
        return task_of(self.config)

    @property
    def known(self) -> Known:
        return self.kept.known

    @property
    def classes(self) -> list[str] | None:
        return self.known.classes or list(self.task.class_names) or None

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)

    @torch.no_grad()
    def predict(self, examples: Iterable[Any], batch_size: int = 32) -> list[dict[str, Any]]:
        """The answer for every example: texts, or the files of images, or rows of ids (a tensor).

        Classes have an "answer" (its name) and a "probability", numbers have an "answer". A run with `--ensemble` was
        tested as an ensemble, and answers as one.
        """
        if isinstance(examples, Mapping) or hasattr(examples, "columns") or hasattr(examples, "column_names"):
            raise TypeError('predict() takes a list of examples; of a table, pass a column: predict(table["text"])')
        if isinstance(examples, str) or not isinstance(examples, Iterable):
            raise TypeError("predict() takes a list of examples; put a single text in a list: predict([text])")
        examples = examples if isinstance(examples, Tensor) else list(examples)
        device = next(self.parameters()).device
        found: list[dict[str, Any]] = []
        tokens: list[int] = []
        members = self.config.ensemble
        model = Members(self.model, members, self.task.answers) if members else self.model
        with self.task.evaluating(self.model):
            for start in range(0, len(examples), batch_size):
                part = examples[start : start + batch_size]
                rows = {"ids": part} if isinstance(part, Tensor) else self.task.encode(part, self.known)
                tokens += rows["tokens"].tolist() if "tokens" in rows else []
                rows = {name: column.to(device) for name, column in rows.items()}
                found += self.task.decode(model(*self.task.inputs(rows)).float(), rows, self.known)
        if note := cut_note(tokens, self.known.length):
            say(note, error=True)
        return found

    def export(self, folder: str | Path) -> Path:
        """Write a folder that `weft.load` opens elsewhere. It must not exist yet."""
        target = Path(folder)
        host = host_of(self.model)
        facts = {"step": self.step, "test": self.test, "commit": self.commit}
        with new_folder(target) as temporary:
            opens = f'weft.load("{target.name}")'
            own = temporary
            if host is not None:
                own = temporary / OWN
                own.mkdir()
                opens += "  # or " + save_host(self.model, host, self.config, self.known, temporary, target.name)
                (own / "facts.json").write_text(json.dumps(facts))
            for name, text in self.kept.files().items():
                (own / name).write_text(text, encoding="utf-8")
            (own / "config.json").write_text(to_json(portable(self.config)))
            if self.config.task_file:
                shutil.copy(self.config.task_file, own)
            (temporary / "README.md").write_text(self._card(target.name, opens), encoding="utf-8")
            if host is None:
                state = {k: v.detach().cpu().contiguous().clone() for k, v in self.model.state_dict().items()}
                save_file(state, temporary / MODEL, metadata={"weft": json.dumps(facts)})
        return target

    def _card(self, name: str, opens: str) -> str:
        config, rows = portable(self.config), self.kept.record["rows"]
        head, plus, changes = self.commit.partition("+")
        sizes = "" if ":" in config.model else f", {config.layers} layers of {config.heads} heads"
        lines = [
            f"# {name}",
            "",
            f"{config.model} with `{config.attention}` attention{sizes}. "
            f"Trained with weft on the task `{config.task}` for {self.step:,} steps (seed {config.seed}, commit "
            f"{head[:12] or 'unknown'}{plus}{changes}).",
            "",
            f"- Data: {Path(config.data).name}; {rows['train']:,} training, {rows['val']:,} validation and "
            f"{rows['test']:,} test examples",
            f"- Test: {', '.join(f'{k} {v:.4g}' for k, v in self.test.items()) or 'not tested'}",
        ]
        if self.classes:
            shown = ", ".join(self.classes[:20]) + (" …" if len(self.classes) > 20 else "")
            lines.append(f"- Classes: {shown}")
        if config.task_file:
            lines.append(
                f"- Needs `{Path(config.task_file).name}`, which weft runs. On another machine, read the copy in this "
                "folder, and set `task_file` in config.json to where it is"
            )
        if "scale" in self.known.facts:
            mean, deviation = self.known.facts["scale"]
            lines.append(f"- Answers: {mean} + {deviation} × the model's output; `predict` computes this")
        return "\n".join([*lines, "", "```python", f"model = {opens}", "```", ""])


def own_files(folder: Path) -> Path:
    """Where weft's files are: models of other libraries are exported with their files beside these."""
    return folder / OWN if (folder / OWN / "config.json").is_file() else folder


def is_exported(folder: Path) -> bool:
    return own_files(folder) != folder or (folder / MODEL).exists()


def load(folder: str | Path, which: str = "", device: str | torch.device | None = None) -> Trained:
    """The trained model of a run or of an exported folder, ready for `predict`. Training data is not needed.

    which: the weights of a run: best, last or average; default: the run's `test_on`. An export has only those.
    """
    folder = Path(folder)
    own = own_files(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is neither a run nor an exported model: {missing_config(folder)}")
    kept = read_kept(own)
    if kept is None:
        raise ValueError(
            f"{folder} is neither a run nor an exported model: it has no data.json. weft.huggingface.load opens "
            "models of transformers, weft.timm.load those of timm"
        )
    if which and is_exported(folder):
        raise ValueError(f"{folder} is an exported model with only one set of weights: remove --which {which}")
    extra: dict[str, Any] = {}
    tensors: dict[str, Tensor] | None = None
    if own != folder:
        config = from_json((own / "config.json").read_text())
        facts = json.loads((own / "facts.json").read_text())
        step, test, commit = int(facts["step"]), facts["test"], facts["commit"]
    elif is_exported(folder):
        config = from_json((folder / "config.json").read_text())
        try:
            with safe_open(str(folder / MODEL), framework="pt", device="cpu") as file:
                facts = json.loads((file.metadata() or {}).get("weft", "{}"))
                tensors = {f"model/{name}": file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{folder / MODEL} is damaged ({error}): copy or export it again") from None
        step, test, commit = int(facts.get("step", 0)), facts.get("test", {}), facts.get("commit", "")
    else:
        run = Run(folder)
        config = run.config()
        tensors, numbers = saved_weights(run, which or config.test_on)
        extra, step = numbers.get("extra", {}), int(numbers["step"])
        test = (run.result() or {}).get("test", {}) if which in ("", config.test_on) else {}  # of other weights
        commit = (run.starts() or [{}])[-1].get("commit", "")
    config.check()
    known = kept.known
    data = TaskData(
        {}, {}, {}, known.length, known.facts, known.vocabulary, classes=known.classes, tokenizer=known.tokenizer
    )
    model = build_model(config, data)
    if tensors is None:
        load_host(model, config, folder)
    else:
        restore_model(model, tensors, extra)
    return Trained(model, config, kept, step, test, commit).to(device or "cpu")
