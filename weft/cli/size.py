"""The command `weft size`: parameters and checkpoint sizes, compared with the papers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..models.sizes import SizeRow


def size(
    task: Annotated[
        str | None, typer.Argument(help="imdb-token, imdb-byte, listops, matching; pvt, timm, crate, pathways")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="one mechanism, or 'mixed'; default: the study's ten")] = None,
    layers: Annotated[int | None, typer.Option(help="a custom shape, together with --heads")] = None,
    heads: Annotated[int | None, typer.Option(help="a custom shape, together with --layers")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="all shapes of the study, not only the deepest and the widest")
    ] = False,
) -> None:
    """Parameters and checkpoint sizes of the wide-attention study's models, compared with the paper's Table 8.

    `pvt`: PVT plain and cached, with multiply-adds, compared with the cache paper. `timm`: that paper's other models.
    `crate`: the four published sizes of CRATE. `pathways`: exaFLOP of training, as in the subsampled paper's Table 7.
    """
    if task in ("pvt", "timm", "crate", "pathways"):
        if attention is not None or layers is not None or heads is not None or every:
            raise typer.BadParameter(f"--attention, --layers, --heads and --all have no effect on {task}: remove them")
        if task == "crate":
            show_crate()
            return
        if task == "pathways":
            from ..lab.bench.exaflop import table_7

            for name, ours, paper in table_7():
                typer.echo(f"{name:14} {ours:6.2f} exaFLOP, paper {paper}")
            return
        from ..lab.bench.pvt_sizes import pvt_sizes, show_costs, timm_sizes

        show_costs(pvt_sizes() if task == "pvt" else timm_sizes())
        return
    from ..models.presets import STUDY_ATTENTIONS, TASKS
    from ..models.sizes import PUBLISHED_EXTRAS, study_rows

    if task is not None and task not in TASKS:
        raise typer.BadParameter(f"unknown task {task!r}; available: {', '.join(TASKS)}, pvt, timm, crate, pathways")
    if (layers is None) != (heads is None):
        raise typer.BadParameter("set both --layers and --heads, or neither")
    names = STUDY_ATTENTIONS if attention is None else (attention,)
    for name in TASKS if task is None else (task,):
        shapes = None
        if layers is not None and heads is not None:
            shapes = [(layers, heads)]
        elif every:
            shapes = list(TASKS[name].shapes)
        try:
            rows = study_rows(name, names, shapes)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        show(f"{name}, documents of {TASKS[name].length}", rows)
    notes = [
        "MiB: 12 bytes per parameter (float32 weight and Adam's two moments), rounded up.",
        "paper: Wide Attention Is The Way Forward For Transformers? (arXiv 2210.00640), Table 8.",
        "published: the size of the authors' code, if it differs from ours:",
        *(f"  {name}: {why}" for name, why in PUBLISHED_EXTRAS.items() if name in names),
    ]
    typer.echo("\n".join(notes if len(notes) > 3 else notes[:2]))


def show(title: str, rows: list[SizeRow]) -> None:
    """Print the rows as a table."""
    from ..lab.bench.report import Table
    from ..models.sizes import checkpoint_size

    headings = ("model", "layers x heads", "parameters", "ours, MiB", "published, MiB", "paper, MiB", "of the deepest")
    table, deepest = Table(title, headings), dict[str, int]()
    for row in rows:
        ours, theirs = checkpoint_size(row.parameters), checkpoint_size(row.published)
        share = row.parameters / deepest.setdefault(row.model, row.parameters)
        counts = row.model, row.shape, f"{row.parameters:,}", ours, theirs, row.printed or "-"
        table.rows.append((*counts, f"{share:.3f}"))
    table.show()


CRATE_PRINTED = {"tiny": 6.09, "small": 13.12, "base": 22.80, "large": 77.64}  # M, arXiv 2306.01129, Table 1


def show_crate() -> None:
    """Print the published sizes of CRATE as a table."""
    import torch

    from ..lab.bench.report import Table
    from ..models.crate import SIZES, crate
    from ..models.sizes import parameters

    headings = ("model", "layers x heads", "width", "parameters", "ours, M", "paper, M")
    table = Table("CRATE, images of 224 x 224, 1,000 classes", headings)
    for name, shape in SIZES.items():
        with torch.device("meta"):
            count = parameters(crate(name))
        counts = f"{count:,}", f"{count / 1e6:.2f}", f"{CRATE_PRINTED[name]:.2f}"
        shown = f"{shape['layers']}x{shape['heads']}", str(shape["dim"])
        table.rows.append((f"CRATE-{name.capitalize()}", *shown, *counts))
    table.show()
    typer.echo("paper: White-Box Transformers via Sparse Rate Reduction (arXiv 2306.01129), Table 1.")
