"""Images that nobody labelled -> coefficients that suit them, and a judgement without labels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace

import torch

from atlas_cli.core.losses import logits_of
from atlas_cli.core.unlabelled import OBJECTIONS, Signs, objection, read_signs
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import UsageError
from atlas_cli.learning.batches import show
from atlas_cli.learning.loop import generator_of
from atlas_cli.learning.selection import Fold, Score, Selection
from atlas_cli.learning.setup import Setting, training_of
from atlas_cli.learning.unlabelled import Unlabelled, UnlabelledConfig, Unsupervised, problem_of
from atlas_cli.recipes.learning import TtaRecipe, parse_schedule, parse_shares

_SHOWN_AT_ONCE = 256
_ZERO, _LAST = "all coefficients are 0", "the last step is kept"


@dataclass(frozen=True)
class Adaptation(Unlabelled):
    """The same with where coefficients start, and whether a guard watches over them."""

    start: torch.Tensor
    guarded: bool = True
    scaled: bool = False
    backtrack: tuple[float, ...] = ()
    _signs: dict[bytes, Signs] = field(default_factory=dict, repr=False, kw_only=True)

    def is_judged(self, fold: Fold) -> bool:
        """Always: judging needs no labels."""
        return True

    def problem(self, fold: Fold) -> Unsupervised:
        """What a stage learns."""
        return problem_of(self)

    def judge(self, fold: Fold, coefficients: torch.Tensor) -> Score:
        """What can be told of coefficients without labels, beside zero-shot."""
        found, zero = self.signs(coefficients), self.signs(torch.zeros_like(self.start))
        moved = bool(coefficients.any())
        fault = objection(zero, found) if moved and self.guarded else None
        values = dataclasses.asdict(found)
        if fault:
            values[fault] = 1.0
        rank = found.merit if self.guarded else float(moved)
        return Score((float(fault is None), rank), values, fault is None)

    def signs(self, coefficients: torch.Tensor) -> Signs:
        """How the images are classified with coefficients: seen as they are and in other views."""
        key = coefficients.cpu().numpy().tobytes()
        if key not in self._signs:
            self.tower.load(coefficients)
            weak, strong = self.probabilities(), self._other_views()
            self._signs[key] = read_signs(weak, strong, self.prior)
        return self._signs[key]

    def predictions(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The prediction for every image with coefficients, (images, classes)."""
        self.tower.load(coefficients)
        return self.probabilities()

    def decision(self, selection: Selection) -> str:
        """Which rule decided, in a few words."""
        faults = [name for check in selection.checks for name in OBJECTIONS if name in check.values]
        if not selection.improved:
            gravest = min(faults, key=list(OBJECTIONS).index, default=None)
            why = f"{gravest}, since {OBJECTIONS[gravest]}" if gravest else "nothing was learned"
            return f"{_ZERO}: {why}"
        epochs = len(selection.checks) - 1
        if not self.guarded:
            return f"{_LAST}: nothing was checked"
        if not selection.checks:
            scale = selection.coefficients.flatten()[0].item()
            return f"the scale {scale:g} was best by entropy and spread"
        kept = next(n for n, check in enumerate(selection.checks) if check is selection.after)
        said = f"epoch {kept} of {epochs} was best by entropy and spread"
        return f"{said}; {', '.join(sorted(set(faults)))} in others" if faults else said

    def _other_views(self) -> torch.Tensor:
        """The prediction for a strong view of every image, the same views each time."""
        random = generator_of(self.training.seed, "judge")
        found = []
        for start in range(0, self.count, _SHOWN_AT_ONCE):
            some = range(start, min(start + _SHOWN_AT_ONCE, self.count))
            images = show(self.pixels, some, random, self.training.augment)
            found.append(logits_of(self.tower.features(images), self.head).softmax(dim=1).cpu())
        return torch.cat(found)


def adapt(setting: Setting) -> tuple[Adaptation, list[Fold]]:
    """Learn from the images of one folder, whoever they show."""
    objective = adaptation_of(setting, setting.tasks[0])
    everything = (tuple(range(objective.count)),)
    return objective, [Fold("all", everything, everything, objective.guarded)]


def adaptation_of(setting: Setting, pixels: Pixels) -> Adaptation:
    """What a recipe learns from images."""
    recipe: TtaRecipe = setting.inputs.recipe
    training = training_of(recipe)
    optimizer_config = replace(training.optimizer_config, sharp=recipe.objective == "sar")
    threshold = parse_schedule(recipe.threshold) or (0.0, 0.0)
    return Adaptation(
        setting.tower,
        pixels,
        setting.heads[0],
        prior_of(recipe, len(setting.heads[0])),
        replace(training, optimizer_config=optimizer_config),
        UnlabelledConfig(recipe.objective, recipe.trusted_per_class, recipe.power, threshold),
        setting.table(),
        guarded=recipe.select == "guard",
        scaled=setting.scaled,
    )


def prior_of(recipe: TtaRecipe, classes: int) -> torch.Tensor:
    """How often every class is expected: alike, or as the recipe says."""
    shares = parse_shares(recipe.prior) or [1.0] * classes
    if len(shares) != classes:
        raise UsageError(f"--prior: has {len(shares)} shares for {classes} classes")
    found = torch.tensor(shares)
    return found / found.sum()
