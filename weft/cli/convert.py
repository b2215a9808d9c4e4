"""The command `weft convert MODEL --to linear`: another attention mechanism for a trained transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .device import Device, chosen


def convert(
    model: Annotated[
        str, typer.Argument(help="a causal language model: a folder of save_pretrained, or a name on the hub")
    ],
    to: Annotated[str, typer.Option(help="the mechanism, see `weft attentions`")],
    data: Annotated[Path, typer.Option(help="a text file to train on")],
    out: Annotated[Path, typer.Option(help="folder of the converted model, its report and checkpoints")],
    steps: Annotated[int, typer.Option(min=0, help="steps of fine-tuning")] = 1000,
    transfer_steps: Annotated[
        int | None, typer.Option(min=0, help="steps of transfer; default: half of --steps")
    ] = None,
    length: Annotated[int | None, typer.Option(min=2, help="tokens per sequence; default: the model's maximum")] = None,
    transfer_length: Annotated[
        int | None, typer.Option(min=2, help="tokens per sequence in transfer; default: --length")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences per step")] = 8,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate of fine-tuning")] = 3e-4,
    transfer_learning_rate: Annotated[float, typer.Option(help="peak learning rate of transfer")] = 1e-3,
    lora: Annotated[int | None, typer.Option(min=1, help="fine-tune only adapters of this rank (needs peft)")] = None,
    option: Annotated[list[str], typer.Option(help="option of the mechanism, as block_size=64; repeatable")] = [],  # noqa: B006
    as_bytes: Annotated[
        bool, typer.Option("--bytes", help="the model's tokens are bytes, so it needs no tokenizer")
    ] = False,
    precision: Annotated[str, typer.Option(help="32-true, tf32 or bf16-mixed; default by device")] = "",
    device: Device = "",
    seed: Annotated[int, typer.Option(help="seed of the data order")] = 0,
) -> None:
    """Convert a trained model to another attention: swap, attention transfer, fine-tuning.

    The same command continues after an interruption. Load the result with weft.huggingface.load.
    """
    import torch

    from ..lab.conversion import convert as run
    from ..lab.divergence import Diverged
    from ..lab.say import say

    options, place = dict(_option(text) for text in option), chosen(device)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError("weft convert needs transformers: pip install 'weft[huggingface]'") from error
    from ..adapt.huggingface import load

    if (out / "config.json").exists() and not (out / "checkpoints").exists():
        raise ValueError(f"{out} already has a model, which is not from weft convert: choose another --out")
    content = data.read_bytes()
    try:
        swapped = "weft" in vars(AutoConfig.from_pretrained(model))
        loaded = load(model) if swapped else AutoModelForCausalLM.from_pretrained(model)
    except OSError as error:
        problem = str(error).splitlines()[0]
        raise ValueError(f"{model} is neither a folder of save_pretrained nor a model of the hub: {problem}") from error
    tokenizer = None
    if as_bytes:
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ValueError(f"{model} has no tokenizer: for a model of bytes, add --bytes") from error
        tokens = torch.tensor(tokenizer(content.decode(), verbose=False)["input_ids"])
    try:
        report = run(
            loaded.to(place),
            to,
            tokens,
            steps=steps,
            transfer_steps=transfer_steps,
            length=length,
            transfer_length=transfer_length,
            batch_size=batch_size,
            learning_rate=learning_rate,
            transfer_learning_rate=transfer_learning_rate,
            lora=lora,
            precision=precision,
            seed=seed,
            folder=out / "checkpoints",
            **options,
        )
    except Diverged as error:  # weft train says it by itself
        say(f"weft: {error}", error=True)
        raise
    loaded.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    report.save(out / "conversion.json")
    say(report)
    say(f"load it with weft.huggingface.load({str(out)!r})")


def _option(text: str) -> tuple[str, Any]:
    import json

    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--option must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
