"""Models of transformers and timm, with a mechanism swapped in: --model hf:NAME and --model timm:NAME.

    hf:llama                   a model type with its default sizes; change them with --model-options
    hf:config.json             a config
    hf:FOLDER, hf:OWNER/NAME   a config, and weights if there are any; a tokenizer.json there is used as well

A model without weights gets the vocabulary, classes and length of the data. The run stores the resulting config (the
fact "hf"), so that the trained model can be loaded without the folder.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attention_info
from ..models.generate import check_sampling
from .base import Known
from .config import TrainConfig


def check_hosted(config: TrainConfig) -> None:
    if config.packed:
        raise ValueError(f"--model {config.model} does not support --packed: remove it")
    if len(config.mechanisms()) > 1 and not isinstance(config.mechanisms(), str):
        raise ValueError(f"--model {config.model} supports a single mechanism, got {config.attention!r}")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("hf: models need transformers: pip install 'weft[huggingface]'") from error
    return transformers


def _source(config: TrainConfig) -> tuple[dict[str, Any], str | None]:
    """The model's config, and where its weights are."""
    transformers, name = _transformers(), config.model.removeprefix("hf:")
    path, weights = Path(name), None
    if path.is_dir() or path.is_file():
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            kind = values["model_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--model {config.model}: {file} is not a transformers config ({error!r})") from None
        weights = name if path.is_dir() and any([*path.glob("*.safetensors"), *path.glob("*.bin")]) else None
    elif name in transformers.CONFIG_MAPPING:
        kind, values = name, {}
    elif name.startswith(("/", ".", "~")):
        raise ValueError(f"--model {config.model}: there is no file or folder {name}")
    else:
        try:
            found = transformers.AutoConfig.from_pretrained(name)
        except Exception as error:  # no network, no such model, no config
            near = difflib.get_close_matches(name, list(transformers.CONFIG_MAPPING), n=3)
            raise ValueError(
                f"--model {config.model} is not a folder, a config.json, a model type"
                f"{' (did you mean ' + ' or '.join(near) + '?)' if near else ' such as llama'}, or a model of the hub "
                f"({str(error).splitlines()[0]})"
            ) from None
        kind, values, weights = found.model_type, found.to_dict(), name
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"--model {config.model}: this version of transformers has no model type {kind!r}")
    made = transformers.CONFIG_MAPPING[kind].from_dict(values)
    for option in config.options("model_options"):
        if not hasattr(made, option):
            near = difflib.get_close_matches(option, list(made.to_dict()), n=1)
            raise ValueError(f"model_options: {kind} has no {option!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    made = transformers.CONFIG_MAPPING[kind].from_dict({**values, **config.options("model_options")})
    return {**made.to_dict(), "model_type": kind}, weights


def tokenizer_of(config: TrainConfig) -> str | None:
    """The tokenizer that belongs to the weights, as text; None if the model has none, or --tokenizer names another."""
    if not config.hosted or config.tokenizer:
        return None
    weights = _source(config)[1]
    if weights is None:
        return None
    file = Path(weights) / "tokenizer.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not Path(weights).is_dir():
        tokenizer = _transformers().AutoTokenizer.from_pretrained(weights)
        if getattr(tokenizer, "backend_tokenizer", None) is not None:
            return tokenizer.backend_tokenizer.to_str()
    raise ValueError(f"{weights} has weights, but no tokenizer.json: set the tokenizer with --tokenizer")


def longest(config: TrainConfig, length: int) -> int:
    """`length`, or less if the weights have fewer positions."""
    if not config.hosted:
        return length
    values, weights = _source(config)
    most = values.get("max_position_embeddings") or values.get("n_positions") or length
    if weights is None or length <= most:
        return length
    if config.max_length:
        raise ValueError(f"--max-length {config.max_length} is more than the {most} positions of {config.model}")
    return most


def host_facts(
    config: TrainConfig,
    known: Known | None,
    *,
    length: int = 0,
    vocab: int = 0,
    padding: bool = True,
    from_file: bool = False,
    classes: Sequence[str] | int | None = None,
    size: int = 0,
) -> dict[str, Any]:
    """The facts of a hosted model: its config for this data, and "shift", which turns our ids into the model's.

    Our id 0 is padding. The ids of a tokenizer's file are shifted by 1 for that; those of vocabularies made here
    start at 1 anyway, and the model uses them as they are.
    """
    if not config.hosted:
        return {}
    if known is not None:
        return {name: known.facts[name] for name in ("hf", "shift")}
    transformers = _transformers()
    values, weights = _source(config)
    description = values.pop("weft", None)
    made = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    ids = vocab - 1 if from_file and padding else vocab
    if weights is None and vocab:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            special = getattr(made, name, None)
            if isinstance(special, int) and special >= ids:  # of the model's own vocabulary, which is larger
                setattr(made, name, None)
    if weights is None and not from_file:
        made.bos_token_id = made.eos_token_id = None
        made.pad_token_id = 0 if padding else None
    elif padding and made.pad_token_id is None and weights is None:
        made.pad_token_id, ids = ids, ids + 1  # not an id of the tokenizer: decoders take the last other id as the end
    elif padding and made.pad_token_id is None:
        end = made.eos_token_id
        made.pad_token_id = (end[0] if isinstance(end, list) else end) or 0
    if vocab and weights is None:
        made.vocab_size = ids
        made.max_position_embeddings = max(getattr(made, "max_position_embeddings", 0), length + 2)
    elif vocab and ids > made.vocab_size:
        raise ValueError(f"the tokenizer has {ids} tokens, but {config.model} only {made.vocab_size}")
    if size and weights is None:
        made.image_size = size
    if classes is not None:
        names = [str(i) for i in range(classes)] if isinstance(classes, int) else list(classes)
        made.id2label, made.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    stored = json.loads(made.to_json_string(use_diff=False))
    stored = {**stored, "model_type": values["model_type"], **({"weft": description} if description else {})}
    facts: dict[str, Any] = {"hf": stored, "shift": int(from_file and padding)}
    if weights is not None:
        facts["weights"] = Path(weights)  # not JSON, so a run does not store it: its checkpoints have the weights
    return facts


class Hosted(nn.Module):
    """A transformers model with weft's call: ids (B, L) or images (B, 3, H, W) to logits. Without `pad`, every id is
    a token; otherwise 0 is padding."""

    def __init__(self, model: nn.Module, pad: int | None = None, shift: int = 0):
        super().__init__()
        self.model, self.pad, self.shift = model, pad, shift
        self.images = getattr(model, "main_input_name", "input_ids") == "pixel_values"
        self.causal = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.images:
            return self.model(pixel_values=x).logits
        named: dict[str, Any] = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        if self.pad is None:
            return self.model(input_ids=x, attention_mask=mask, **named).logits
        real = x > 0
        ids = torch.where(real, x - self.shift, self.pad)
        return self.model(input_ids=ids, attention_mask=real.long(), **named).logits

    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Sequence[int] | None = None,
        stream: Callable[[Tensor], Any] | None = None,
        *,
        seed: int | None = None,
    ) -> Tensor:
        """As `LanguageModel.generate`, through the model's own generate()."""
        check_sampling(temperature, top_k, top_p)
        if seed is not None:
            torch.manual_seed(seed)
        chosen: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            chosen = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
        chosen |= {} if stop is None else {"eos_token_id": stop}
        inner: Any = self.model
        most = getattr(inner.config, "max_position_embeddings", None)
        rotary = any(name.startswith("rope") for name in inner.config.to_dict())  # they have no table of positions
        if most and not rotary and ids.shape[1] + max_new_tokens - 1 > most:
            raise ValueError(
                f"a prompt of {ids.shape[1]} tokens and {max_new_tokens} new ones exceed the {most} positions of the "
                "model: shorten the prompt, or generate fewer tokens"
            )
        return inner.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=None if stream is None else _Streamer(stream),
            **chosen,
        )


class _Streamer:
    """Passes new tokens on; the first call of transformers has the prompt."""

    def __init__(self, stream: Callable[[Tensor], Any]):
        self.stream, self.prompt = stream, True

    def put(self, value: Tensor) -> None:
        if not self.prompt:
            self.stream(value)
        self.prompt = False

    def end(self) -> None:
        pass


def hosted_model(config: TrainConfig, facts: dict[str, Any], kind: str, length: int, padding: bool = True) -> nn.Module:
    """transformers' `AutoModelFor{kind}`, with the mechanism of the config; "full" keeps the model's own attention."""
    transformers = _transformers()
    values = dict(facts["hf"])
    description = values.pop("weft", None)
    made = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    auto = getattr(transformers, f"AutoModelFor{kind}")
    if type(made) not in auto._model_mapping:
        raise ValueError(f"--model {config.model}: transformers has no {kind} model for {values['model_type']!r}")
    if "weights" in facts and description is not None:
        from ..adapt.huggingface import load

        model = load(facts["weights"], dtype=torch.float32)
        if type(model) is not auto._model_mapping[type(made)] or model.config.num_labels != made.num_labels:
            raise ValueError(f"--model {config.model} is a {type(model).__name__} with weft's changes: it can only be "
                             "trained further on the same task and classes")  # fmt: skip
    elif "weights" in facts:
        model = auto.from_pretrained(facts["weights"], config=made, dtype=torch.float32, ignore_mismatched_sizes=True)
    else:
        model = auto.from_config(made, dtype=torch.float32)
        if description is not None:
            from ..adapt.saved import apply

            apply(model, description)
    swap_in(model, config, length)
    return Hosted(model, made.pad_token_id if padding else None, facts["shift"])


def host_of(model: nn.Module) -> nn.Module | None:
    """The transformers or timm model inside a model of a task; None if it is weft's own."""
    from ..models.image import Normalised

    inner = model.model if isinstance(model, Normalised) else model
    if isinstance(inner, Hosted):
        return inner.model
    return inner if type(inner).__module__.startswith("timm.") else None


def swap_in(model: nn.Module, config: TrainConfig, length: int) -> None:
    """Replace the attention of a model of another library."""
    name = str(config.mechanisms())
    if name == "full":
        return
    from ..adapt.surgery import swap

    longest = length if attention_info(name).needs_max_length else None
    report = swap(model, to=name, max_length=longest, **config.options())
    if not report.replaced:
        why = next(iter(report.refused.values()), "it has no attention layers")
        raise ValueError(f"{name} cannot replace the attention of {config.model}: {why}")
