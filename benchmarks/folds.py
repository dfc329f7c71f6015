"""How often folds choose by chance: candidates of `--adapter auto` that are equally good.

    python benchmarks/folds.py [--images 40] [--right 0.6] [--draws 2000]

Every candidate is right on the same share of images held out; a share `likeness` of the images is
as hard for all of them. Prints how often another than the first is taken, by the rule of atlas and
by 1.5 standard errors of the better one's accuracy, the rule until 2026-11-18.
"""

from __future__ import annotations

import argparse
import math

import torch

from atlas_cli.learning.heads import candidates, chosen, label_of


def shares(options: argparse.Namespace, likeness: float) -> list[list[float]]:
    """The accuracy of every candidate in every draw."""
    random = torch.Generator().manual_seed(0)
    shape = options.draws, len(candidates()), options.images
    own, common = (torch.rand(size, generator=random) for size in (shape, (shape[0], 1, shape[2])))
    alike = torch.rand(shape, generator=random) < likeness
    right = torch.where(alike, common, own) < options.right
    found: list[list[float]] = right.double().mean(dim=2).tolist()
    return found


def before(first: float, *others: float, images: int) -> bool:
    """Whether another was taken until 2026-11-18."""
    best = max(others)
    return best > first + 1.5 * math.sqrt(max(best * (1 - best), 1 / images) / images)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--right", type=float, default=0.6, help="share of images")
    parser.add_argument("--draws", type=int, default=2000)
    options = parser.parse_args()
    names = [label_of(one) for one in candidates()]
    losses = {f"{name} loss": 1.0 for name in names}
    print("| likeness | 1.5 errors of one | now |\n| --- | --- | --- |")
    for likeness in (0.0, 0.5, 0.7):
        rows = shares(options, likeness)
        old = sum(before(*row, images=options.images) for row in rows)
        scores = ({**dict(zip(names, row, strict=True)), **losses} for row in rows)
        new = sum(chosen(one, options.images) != candidates()[0] for one in scores)
        print(f"| {likeness} | {100 * old / len(rows):.1f} % | {100 * new / len(rows):.1f} % |")


if __name__ == "__main__":
    main()
