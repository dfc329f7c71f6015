"""atlas tta: adapt coefficients to images that nobody labelled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from atlas_cli.commands.learning_options import Wishes, given_flags, learning_command

Images = Annotated[
    str | None,
    typer.Argument(metavar="IMAGES", help="Images whose labels are not looked at, or a recipe."),
]
Classes = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Class names: a,b,c or a file with one per line."),
]
Objective = Annotated[
    str | None,
    typer.Option(metavar="LOSS", help="ufm (default), entropy, balanced-entropy, sar or simclr."),
]
Tune = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="coefficients (default), or layernorm: no vectors needed."),
]
TrustedPerClass = Annotated[
    int | None, typer.Option(metavar="K", help="ufm: images of a class that are trusted.")
]
Power = Annotated[
    float | None,
    typer.Option(help="ufm: exponent of predictions; above 1 sharpens, below 1 flattens."),
]
Threshold = Annotated[
    str | None,
    typer.Option(metavar="START:END", help="ufm: how sure a prediction must be, over the epochs."),
]
Prior = Annotated[
    str | None,
    typer.Option(metavar="SHARES", help="How often classes occur: uniform (default) or 0.9,0.1."),
]
Predictions = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Predictions as JSON lines, one per image.")
]
Online = Annotated[
    bool,
    typer.Option("--online", help="Paths on stdin: predict, print a line, adapt as they come."),
]


@learning_command
def tta(
    images: Images = None,
    classes: Classes = None,
    objective: Objective = None,
    tune: Tune = None,
    trusted_per_class: TrustedPerClass = None,
    power: Power = None,
    threshold: Threshold = None,
    prior: Prior = None,
    predictions: Predictions = None,
    online: Online = False,
    *,
    flags: dict[str, Any],
    wishes: Wishes,
) -> None:
    """Adapt coefficients to images without labels, and print the learned recipe.

    --select is guard (default: the best epoch that nothing speaks against, else zero-shot) or last.

    Example: atlas tta photos/ --classes cat,dog --model ViT-B-32/openai --vectors v/*.safetensors
    """
    from atlas_cli.commands.adapting import Adapting, read_classes
    from atlas_cli.commands.learning import run
    from atlas_cli.commands.streaming import run_online
    from atlas_cli.errors import UsageError

    own = {
        "classes": read_classes(classes) if classes else None,
        "objective": objective,
        "tune": tune,
        "trusted_per_class": trusted_per_class,
        "power": power,
        "threshold": threshold,
        "prior": prior,
    }
    keys = {**flags, **given_flags(own)}
    if online:
        if predictions:
            raise UsageError("--online prints its predictions; --predictions is for a folder")
        run_online(images, keys, wishes)
    elif images is None:
        raise UsageError("no images given; name a folder, or pipe paths into --online")
    else:
        run(Adapting(predictions), [images], keys, wishes)
