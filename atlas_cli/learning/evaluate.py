"""Models and datasets -> one row of scores for each pair, compared image by image."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import DataLoader

from atlas_cli.datasets.dataset import Dataset, load
from atlas_cli.errors import AtlasError, DataError, is_out_of_memory
from atlas_cli.models.clip import (
    Classifier,
    Clip,
    Opening,
    Preprocess,
    logits_of,
    open_model,
    zero_shot_head,
)
from atlas_cli.models.heads import head_of
from atlas_cli.parallel import signals_held
from atlas_cli.recipes.model import as_percent
from atlas_cli.sources.locate import Source

_MANY_CLASSES = 10  # with no more than this, top-5 says little
_FEW = 64  # below this many images, starting a worker costs more than it saves
_DEFAULT_BATCH = {"cpu": 64, "cuda": 256}  # 128 on others


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image: the best classes, best first, and the first's probability."""

    key: str
    label: int
    ranked: tuple[int, ...]
    probability: float

    @property
    def correct(self) -> bool:
        """Whether the best class is the label."""
        return self.ranked[0] == self.label


@dataclass(frozen=True)
class ModelScore:
    """A model on a dataset; accuracies in percent. `delta` and `p_value` are against the first."""

    model: str
    data: str
    split: str
    images: int
    skipped: int
    top1: float
    low: float
    high: float
    top5: float | None
    mean_class: float
    delta: float | None = None
    p_value: float | None = None


@dataclass(frozen=True)
class Watcher:
    """Who is told of warnings, and of how many images have been classified."""

    warn: Callable[[str], None] = lambda text: None
    advance: Callable[[int], None] = lambda count: None


@dataclass(frozen=True)
class Loading:
    """How images are read. None of it changes a prediction."""

    batch_size: int | None = None
    workers: int | None = None
    skip_broken: bool = False


def predict(
    clip: Clip, dataset: Dataset, loading: Loading, watcher: Watcher
) -> tuple[list[Prediction], int]:
    """The prediction for every image, and how many broken ones were left out."""
    if not dataset.labelled:
        raise DataError(f"{dataset.name}: has no labels; eval needs a sub-folder per class")
    choose = head_of if clip.has_head else zero_shot_head
    head = choose(clip, dataset.classes, dataset.templates, watcher.warn)
    size = loading.batch_size or _DEFAULT_BATCH.get(clip.device.type, 128)
    predictions: list[Prediction] = []
    skipped = 0
    for batch in batches(
        dataset,
        clip.preprocess,
        size=size,
        workers=loading.workers,
        skip_broken=loading.skip_broken,
    ):
        skipped += len(batch.broken)
        for message in batch.broken:
            watcher.warn(f"{message} (left out)")
        if batch.indices:
            logits = classify(clip, head, batch.images)
            predictions += _rows(dataset, batch.indices, logits)
        watcher.advance(len(batch.indices) + len(batch.broken))
    if not predictions:
        raise DataError(f"{dataset.name}: none of its {skipped} images could be decoded")
    return predictions, skipped


def _predict_shared(
    clip: Clip, dataset: Dataset, loading: Loading, watcher: Watcher
) -> tuple[list[Prediction], int]:
    """The same, where each of several processes takes its share of the images."""
    from atlas_cli.learning import ranks

    some = replace(dataset, samples=tuple(ranks.share(dataset.samples)))
    predictions, skipped = predict(clip, some, loading, watcher)
    count = len(dataset.samples)
    return ranks.joined(predictions, count), sum(ranks.joined([skipped], count))


def classify(clip: Clip, head: Classifier, images: torch.Tensor) -> torch.Tensor:
    """The logits of images, (images, classes); in halves, and halves of those, if memory ends."""
    try:
        with torch.no_grad():
            features = clip.module.encode_image(images.to(clip.device))  # type: ignore[operator]
            return logits_of(features, head).cpu()
    except RuntimeError as problem:
        if not is_out_of_memory(problem):
            raise
        if len(images) == 1:
            raise AtlasError(f"{clip.name}: not enough memory for a single image") from problem
    half = len(images) // 2
    parts = [classify(clip, head, part) for part in (images[:half], images[half:])]
    return torch.cat(parts)


def _rows(dataset: Dataset, indices: list[int], logits: torch.Tensor) -> Iterator[Prediction]:
    ranked = top_k(logits, 5).tolist()
    probabilities = logits.double().softmax(dim=1)
    for row, index in enumerate(indices):
        sample = dataset.samples[index]
        label = -1 if sample.label is None else sample.label
        best = probabilities[row, ranked[row][0]].item()
        yield Prediction(sample.key, label, tuple(ranked[row]), best)


def score(
    model: str, dataset: Dataset, predictions: Sequence[Prediction], skipped: int
) -> ModelScore:
    """The accuracies of one model on one dataset."""
    correct = [prediction.correct for prediction in predictions]
    hits, images = sum(correct), len(correct)
    low, high = wilson(hits, images)
    in_five = sum(prediction.label in prediction.ranked for prediction in predictions)
    return ModelScore(
        model=model,
        data=dataset.name,
        split=dataset.split,
        images=images,
        skipped=skipped,
        top1=as_percent(hits / images),
        low=as_percent(low),
        high=as_percent(high),
        top5=as_percent(in_five / images) if len(dataset.classes) > _MANY_CLASSES else None,
        mean_class=as_percent(mean_class_accuracy(correct, [p.label for p in predictions])),
    )


def compare(ours: Sequence[Prediction], first: Sequence[Prediction]) -> tuple[float, float]:
    """The difference in top-1 to the first model, in percent, and McNemar's p-value for it."""
    mine, theirs = [p.correct for p in ours], [p.correct for p in first]
    return as_percent((sum(mine) - sum(theirs)) / len(mine)), mcnemar(mine, theirs)


@dataclass(frozen=True)
class Evaluation:
    """One model on one dataset: the scores, and the prediction for every image."""

    score: ModelScore
    predictions: Sequence[Prediction]
    provenance: dict[str, object]


def evaluate(
    models: Sequence[Source | Clip],
    datasets: Sequence[Dataset],
    opening: Opening | None = None,
    loading: Loading | None = None,
    watcher: Watcher | None = None,
) -> Iterator[Evaluation]:
    """Score every model on every dataset, and yield after each.

    A model is opened if it is not open yet; one such model is in memory at a time.
    """
    loading, watcher = loading or Loading(), watcher or Watcher()
    first: dict[str, Sequence[Prediction]] = {}
    for number, model in enumerate(models):
        clip = model if isinstance(model, Clip) else open_model(model, opening)
        for doubt in clip.blueprint.doubts:
            watcher.warn(doubt)
        provenance = clip.source.provenance()
        for dataset in datasets:
            if torch.distributed.is_initialized():
                predictions, skipped = _predict_shared(clip, dataset, loading, watcher)
            else:
                predictions, skipped = predict(clip, dataset, loading, watcher)
            result = score(clip.name, dataset, predictions, skipped)
            if number == 0:
                first[dataset.name] = predictions
            else:
                delta, p_value = compare(predictions, first[dataset.name])
                result = replace(result, delta=delta, p_value=p_value)
            yield Evaluation(result, predictions, provenance)
        del clip


# Accuracy and its uncertainty ------------------------------------------------------------------

_Z95 = 1.959963984540054  # the 97.5th percentile of the normal distribution


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k best classes of each row, best first; of equal logits the lower class comes first.

    Shapes: (images, classes) -> (images, k).
    """
    return torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]


def mean_class_accuracy(correct: Sequence[bool], labels: Sequence[int]) -> float:
    """(1/C) sum over classes c of the accuracy on the images of c; absent classes do not count."""
    hits: dict[int, int] = {}
    counts: dict[int, int] = {}
    for right, label in zip(correct, labels, strict=True):
        hits[label] = hits.get(label, 0) + right
        counts[label] = counts.get(label, 0) + 1
    return math.fsum(hits[label] / counts[label] for label in counts) / len(counts)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The Wilson 95 % interval of a proportion.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), with p = successes/trials.
    """
    p, z2 = successes / trials, _Z95**2
    centre = p + z2 / (2 * trials)
    spread = _Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2))
    scale = 1 + z2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """The exact two-sided p-value of McNemar's test for two models on the same images.

    Of n images that only one model gets right, b are ours: min(1, 2 P(X <= min(b, n-b))) for X
    binomial with n trials and probability 1/2.
    """
    pairs = list(zip(ours, theirs, strict=True))
    only_ours = sum(a and not b for a, b in pairs)
    only_theirs = sum(b and not a for a, b in pairs)
    n, fewer = only_ours + only_theirs, min(only_ours, only_theirs)
    if n == 0:
        return 1.0
    log_terms = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
        for i in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, log_terms)))


# Images in batches ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Images and their positions in the dataset; `broken` holds what could not be decoded."""

    images: torch.Tensor
    indices: list[int]
    broken: list[str]


@dataclass(frozen=True)
class _Images:
    """What a worker process needs to decode one image. A broken one becomes its message."""

    dataset: Dataset
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.dataset.samples)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor | str]:
        try:
            return index, self.preprocess(load(self.dataset, self.dataset.samples[index]))
        except DataError as problem:
            return index, str(problem)


def batches(
    dataset: Dataset,
    preprocess: Preprocess,
    *,
    size: int,
    workers: int | None = None,
    skip_broken: bool = False,
) -> Iterator[Batch]:
    """The images in order. Raises DataError for the first broken one unless `skip_broken`."""
    if workers is None:
        workers = min(os.cpu_count() or 1, 8) if len(dataset.samples) > _FEW else 0
    loader: DataLoader[Batch] = DataLoader(
        _Images(dataset, preprocess),  # type: ignore[arg-type]
        batch_size=size,
        num_workers=workers,
        collate_fn=_collate,
    )
    with signals_held():  # while worker processes start
        loaded = iter(loader)
    for batch in loaded:
        if batch.broken and not skip_broken:
            raise DataError(f"{batch.broken[0]} (--skip-broken leaves such images out)")
        yield batch


def _collate(items: list[tuple[int, torch.Tensor | str]]) -> Batch:
    good = [(index, image) for index, image in items if isinstance(image, torch.Tensor)]
    images = torch.stack([image for _, image in good]) if good else torch.empty(0)
    broken = [image for _, image in items if isinstance(image, str)]
    return Batch(images, [index for index, _ in good], broken)
