"""The command `weft generate RUN`: continue a prompt with a language model of the lab."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .device import Device, chosen

if TYPE_CHECKING:
    from ..tasks.base import Known


def generate(
    run: Annotated[Path, typer.Argument(help="the folder of a run or of an exported model")],
    prompt: Annotated[str | None, typer.Option(help="text to continue; default: --file, or standard input")] = None,
    file: Annotated[Path | None, typer.Option(help="read the prompt from this file; - for standard input")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="how many tokens to generate")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="sample from the k most likely tokens")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="sample from the most likely tokens with this total probability")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="random seed of the samples")] = None,
    which: Annotated[str, typer.Option(help="weights: best, last or average; default: the run's test_on")] = "",
    device: Device = "",
) -> None:
    """Continue a prompt with a trained language model. Prints the text as it is generated, and tokens/s at the end."""
    import torch

    from ..lab.trained import load
    from ..models.generate import check_sampling
    from ..models.language import LanguageModel
    from ..tasks.hosts import Hosted
    from ..tasks.text import Bytes

    check_sampling(temperature, top_k, top_p)
    text = _prompt(prompt, file)
    place = chosen(device)
    trained = load(run, which, place)
    model: Any = trained.model
    config = trained.config
    known = isinstance(model, (LanguageModel, Hosted))
    if not known or not isinstance(trained.task, Bytes) or not getattr(model, "causal", False):
        raise typer.BadParameter(
            f"{run} has a {type(model).__name__} trained on {config.task!r}, which does not predict the next token; "
            "weft generate needs a run of a causal language model, such as `weft train lm`"
        )
    encode, writer = code_of(trained.known)
    ids = encode(text)
    if not ids:
        raise typer.BadParameter("the prompt is empty: pass at least one token with --prompt or --file")
    write = writer(ids)
    unread = text  # printed with the first token: what fails before it prints nothing

    def show(new: Any) -> None:
        nonlocal unread
        print(unread + write(int(new[0])), end="", flush=True)
        unread = ""

    begin = time.perf_counter()
    found = model.generate(torch.tensor([ids], device=place), tokens, temperature, top_k, top_p, stream=show, seed=seed)
    seconds = time.perf_counter() - begin
    print(flush=True)
    new = found.shape[1] - len(ids)  # fewer than asked for if a model of transformers ends the text
    speed = f"{new / seconds:.1f} tokens/s ({config.attention}, {place})"
    print(f"{new} tokens in {seconds:.1f} s: {speed}", file=sys.stderr)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise typer.BadParameter("pass --prompt or --file, not both")
    if prompt is not None:
        return prompt
    if file is not None and str(file) != "-":
        if not file.is_file():
            raise typer.BadParameter(f"{file} does not exist")
        return file.read_text(encoding="utf-8", errors="replace")
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: pass --prompt TEXT, --file PATH, or pipe a text")
    return sys.stdin.read()


def code_of(data: Known) -> tuple[Callable[[str], list[int]], Callable[[list[int]], Callable[[int], str]]]:
    """How the run encodes text; and for a prompt's ids, a function from each new id to the text it completes."""
    from ..tasks.text import ids_of

    def encode(text: str) -> list[int]:
        return ids_of(text, data)

    if data.tokenizer is not None:
        from tokenizers import Tokenizer

        bpe = Tokenizer.from_str(data.tokenizer)

        def pieces(prompt: list[int]) -> Callable[[int], str]:
            seen = prompt[-8:]  # decoders drop the space before the first token
            shown = len(bpe.decode(seen))

            def write(new: int) -> str:
                nonlocal shown
                seen.append(new)
                text = bpe.decode(seen)
                if text.endswith("\ufffd"):  # in the middle of a character
                    return ""
                fresh, shown = text[shown:], len(text)
                return fresh

            return write

        return encode, pieces
    if data.vocabulary is not None:
        words = data.vocabulary
        return encode, lambda prompt: lambda new: "\n" if words[new] == "<eos>" else f" {words[new]}"

    def characters(prompt: list[int]) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda new: decoder.decode(bytes([new]))

    return encode, characters
