"""Exported models of transformers and timm: a folder in the library's own format, with weft's files in weft/.

transformers.AutoModelForCausalLM.from_pretrained(folder)      the library's own attention
weft.huggingface.load(folder), weft.timm.load(folder)          with a swapped mechanism or a cache
weft.load(folder)                                              either, with predict()
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from ..models.image import Normalised
from ..tasks.base import Known
from ..tasks.config import TrainConfig
from ..tasks.hosts import Hosted

OWN = "weft"  # the sub-folder of weft's files


def save_host(model: nn.Module, host: nn.Module, config: TrainConfig, known: Known, folder: Path, name: str) -> str:
    """Write the other library's files, and return the Python expression that opens them once the folder has its
    name."""
    changed = config.attention != "full" or config.cache or config.subsample
    if config.model.startswith("timm:"):
        from ..adapt.timm import save
        from ..tasks.images import timm_options

        options = timm_options(config.model.removeprefix("timm:"), known.facts["size"], config.options("model_options"))
        save(host, folder, **options)
        return f'weft.timm.load("{name}")'
    any_host: Any = host
    any_host.save_pretrained(folder)
    if isinstance(model, Normalised):
        from transformers import ViTImageProcessor

        side = known.facts["size"]
        ViTImageProcessor(
            size={"height": side, "width": side}, image_mean=known.facts["mean"], image_std=known.facts["std"]
        ).save_pretrained(folder)
    else:
        assert isinstance(model, Hosted)
        save_tokenizer(model, known, folder)
    kind = type(host).__name__
    return f'weft.huggingface.load("{name}")' if changed else f'{kind}.from_pretrained("{name}")'


def load_host(model: nn.Module, config: TrainConfig, folder: Path) -> None:
    """Replace the inner model by the exported one."""
    outer: Any = model.model if isinstance(model, Normalised) and isinstance(model.model, Hosted) else model
    if config.model.startswith("timm:"):
        from ..adapt.timm import load

        outer.model = load(folder)
        return
    import transformers

    from ..adapt.huggingface import load as load_changed

    values = json.loads((folder / "config.json").read_text())
    cls = getattr(transformers, values["architectures"][0])
    outer.model = load_changed(folder) if "weft" in values else cls.from_pretrained(folder)


def save_tokenizer(model: Hosted, known: Known, folder: Path) -> None:
    """The tokenizer in the model's ids, for AutoTokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from ..tasks.own import MARKED, words_of

    pads = model.pad is not None and not model.shift  # our ids, with padding at 0
    if known.tokenizer is not None:
        values = json.loads(known.tokenizer)
        if pads and values["model"]["type"] == "Unigram":  # trained here
            values["model"]["vocab"] = [["<pad>", 0.0], *values["model"]["vocab"]]
            values["model"]["unk_id"] += 1
            for added in values["added_tokens"]:
                added["id"] += 1
        elif pads:  # a BPE that was trained here
            values["model"]["vocab"] = {"<pad>": 0, **{word: i + 1 for word, i in values["model"]["vocab"].items()}}
        tokenizer = Tokenizer.from_str(json.dumps(values))
    elif known.vocabulary is not None:
        taken = known.vocabulary[2:]  # the corpus may have words such as "<unk>"
        first, unknown = (name if name not in taken else f"<weft-{name[1:]}" for name in ("<pad>", "<unk>"))
        ids = {word: i for i, word in enumerate([first, unknown, *taken])}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unknown))
        letters = r"\p{L}\p{N}_"  # Python's \w; that of tokenizers has combining marks too
        marks = r"\p{M}" if words_of(known.vocabulary) is MARKED else ""
        words = Regex(rf"[{letters}][{letters}{marks}]*")
        cut = pre_tokenizers.Split(words, "removed", invert=True)
        whole = "TokenClassification" in type(model.model).__name__  # the tokens of `tag`, with their punctuation
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit() if whole else cut
    else:
        vocab = {character: byte + pads for byte, character in bytes_to_unicode().items()}
        tokenizer = Tokenizer(models.BPE({**({"<pad>": 0} if pads else {}), **vocab}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    pad = None if model.pad is None else tokenizer.id_to_token(0 if pads else model.pad)
    if pad is None and model.pad is not None:  # the id after those of the tokenizer
        pad = next(name for name in ("<pad>", "<padding>", "<weft-pad>") if tokenizer.token_to_id(name) is None)
        tokenizer.add_special_tokens([pad])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, model_max_length=known.length).save_pretrained(
        folder
    )
