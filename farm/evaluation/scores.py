"""Scores with 95 % intervals: shares of right classes, mean average precision, errors of outputs."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.errors import UnavailableError
from farm.measure.statistics import bound_drawn

# A figure and both ends of its interval at 95 %.
Interval = tuple[float, float, float]
_Z = 1.959964
# Resamplings of the images for an interval of mean average precision.
_DRAWS, _SEED = 200, 7
_MOST_BOXES = 100


def find_wilson(hits: int, count: int) -> Interval:
    """Return a share with Wilson's score interval (Wilson 1927, JASA 22)."""
    share, z = hits / count, _Z**2 / count
    middle, half = share + z / 2, _Z * math.sqrt(share * (1 - share) / count + z / (4 * count))
    return share, max(0.0, (middle - half) / (1 + z)), min(1.0, (middle + half) / (1 + z))


def find_paired_change(ours: Sequence[bool], theirs: Sequence[bool]) -> Interval:
    """Return the change of a share on the same examples (Bonett and Price 2012, J. Educ. Behav. Stat. 37)."""
    count = len(ours)
    won = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    up, down = (won + 1) / (count + 2), (lost + 1) / (count + 2)
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
    return (won - lost) / count, max(-1.0, up - down - half), min(1.0, up - down + half)


def find_rank(scores: npt.NDArray[Any], truth: int) -> int:
    """Return how many classes score higher than the true one; of equal ones the first is higher."""
    flat = np.asarray(scores, "float64").reshape(-1)
    if not np.isfinite(flat[truth]):
        return len(flat)
    return int(np.sum(flat > flat[truth]) + np.sum(flat[:truth] == flat[truth]))


def find_error(outputs: Sequence[npt.NDArray[Any]], wanted: Sequence[npt.NDArray[Any]]) -> float:
    """Return the greatest root mean square error of the outputs, each relative to the wanted one's."""
    worst = 0.0
    for one, other in zip(outputs, wanted, strict=True):
        a, b = np.asarray(one, "float64"), np.asarray(other, "float64")
        size = float(np.sqrt(np.mean(b**2))) if b.size else 0.0
        off = float(np.sqrt(np.mean((a - b) ** 2))) if b.size and a.shape == b.shape else float(a.shape != b.shape)
        worst = max(worst, off / size if size else off)
    return worst


class Precision:
    """Mean average precision over all images, by pycocotools: at an overlap of 50 %, and from 50 % to 95 %.

    `truths` has (class, left, top, right, bottom, is a crowd) by image, `found` the score last. Inside a crowd, boxes
    of its class count neither as right nor as wrong.
    """

    def __init__(self, truths: Sequence[Sequence[Any]], found: Sequence[Sequence[Any]]) -> None:
        """Match boxes. Raises UnavailableError without pycocotools."""
        try:
            from pycocotools.coco import COCO
            from pycocotools.cocoeval import COCOeval
        except ImportError as error:
            raise UnavailableError(
                "mean average precision needs pycocotools, which is not installed",
                "`pip install pycocotools` brings it.",
            ) from error
        with contextlib.redirect_stdout(io.StringIO()):
            truth, made = _to_coco(COCO(), truths, "iscrowd"), _to_coco(COCO(), found, "score")
            self._coco = COCOeval(truth, made, "bbox")
            self._coco.params.areaRng, self._coco.params.areaRngLbl = [[0, 1e10]], ["all"]
            self._coco.params.maxDets = [_MOST_BOXES]
            self._coco.evaluate()
        self._images = list(self._coco.params.imgIds)
        self._matches = np.array(self._coco.evalImgs, dtype=object).reshape(-1, len(self._images))

    def find(self, chosen: Sequence[int] | None = None) -> tuple[float, float]:
        """Return (mAP50, mAP50:95) over the images, or over `chosen` ones by number."""
        images = range(len(self._images)) if chosen is None else chosen
        self._coco.evalImgs = list(self._matches[:, list(images)].reshape(-1))
        # pycocotools looks only at how many there are.
        self._coco.params.imgIds = self._coco._paramsEval.imgIds = list(range(len(images)))
        with contextlib.redirect_stdout(io.StringIO()):
            self._coco.accumulate()
        precision = self._coco.eval["precision"][:, :, :, 0, 0]
        known = precision > -1
        half = known[0]
        return (
            float(precision[0][half].mean()) if half.any() else 0.0,
            float(precision[known].mean()) if known.any() else 0.0,
        )

    def draw(self, count: int = _DRAWS) -> npt.NDArray[np.float64]:
        """Return both figures for resampled images: (draws, 2). Equal numbers of images draw alike."""
        random = np.random.default_rng(_SEED)
        size = len(self._images)
        return np.array([self.find(random.integers(0, size, size).tolist()) for _ in range(count)])


def find_quantiles(value: float, drawn: npt.NDArray[np.float64]) -> Interval:
    """Return a figure with its interval from resamples."""
    low, high = bound_drawn(drawn)
    return value, min(low, value), max(high, value)


def _to_coco(coco: Any, boxes: Sequence[Sequence[Any]], last: str) -> Any:
    """Fill pycocotools' index, which it otherwise reads from a file; `last` names the boxes' last value."""
    annotations = [
        {
            "id": 0,
            "image_id": image,
            "category_id": int(index),
            "bbox": [left, top, right - left, bottom - top],
            "area": (right - left) * (bottom - top),
            "iscrowd": 0,
            last: value,
        }
        for image, each in enumerate(boxes)
        for index, left, top, right, bottom, value in each
    ]
    for number, each in enumerate(annotations, 1):
        each["id"] = number
    categories = sorted({int(each["category_id"]) for each in annotations})
    coco.dataset = {
        "images": [{"id": image} for image in range(len(boxes))],
        "annotations": annotations,
        "categories": [{"id": each, "name": str(each)} for each in categories],
    }
    coco.createIndex()
    return coco
