"""The cost model on made-up features whose speed is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from farm.search.tuners.cost_model import LOSSES, SampleGroup, Trees

ROWS, COLUMNS = 3, 12


def make_candidates(count: int, seed: int) -> tuple[list[npt.NDArray[np.float32]], list[float]]:
    """Feature matrices, and latencies (s) that two of their columns decide."""
    rng = np.random.default_rng(seed)
    matrices = [rng.uniform(size=(ROWS, COLUMNS)).astype("float32") for _ in range(count)]
    latencies = [1e-3 * float(1 + 4 * m[:, 2].mean() + 2 * m[:, 5].max()) for m in matrices]
    return matrices, latencies


def rank_correlation(left: npt.ArrayLike, right: npt.ArrayLike) -> float:
    """Spearman's coefficient of two rankings without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1])


def train(*groups: tuple[list[npt.NDArray[np.float32]], list[float]]) -> Trees:
    """A model taught by groups of (features, latencies), an infinite latency standing for a candidate's own fault."""
    return Trees([SampleGroup(features, latencies) for features, latencies in groups], "reg", 0, 1)


def test_it_learns_to_rank_and_scores_the_best_as_one() -> None:
    """After 200 measured candidates it ranks 100 new ones by speed (Spearman above 0.7). A score is a speed relative to
    the workload's best: what was best scores near 1, nothing far above. A workload a thousand times slower does not
    push another one's scores to zero. Two models that saw the same score the same, to the last bit.
    """
    model = train(make_candidates(200, 1))
    features, latencies = make_candidates(100, 2)
    assert rank_correlation(model.score(features), -np.array(latencies)) > 0.7
    features, latencies = make_candidates(200, 1)
    model = train((features, latencies))
    scores = model.score(features)
    assert 0.7 < scores[int(np.argmin(latencies))] < 1.3
    assert scores.max() < 1.5
    features, latencies = make_candidates(100, 1)
    model = train((features, latencies), (features, [1e3 * latency for latency in latencies]))
    assert model.score(features)[int(np.argmin(latencies))] > 0.6

    def scores() -> npt.NDArray[np.float64]:
        return train(make_candidates(80, 1)).score(make_candidates(20, 2)[0])

    assert np.array_equal(scores(), scores())


def test_what_failed_or_stores_nothing_scores_nothing() -> None:
    """What failed by its own fault scores near zero; the others keep the scale that they have without it. With no good
    trial at all every score is near zero, and finite. No features: its score is zero.
    """
    features, latencies = make_candidates(200, 1)
    bad = [matrix + np.float32(3) for matrix in make_candidates(60, 3)[0]]
    model = train((features + bad, [*latencies, *[np.inf] * len(bad)]))
    good_scores, bad_scores = model.score(features), model.score(bad)
    assert np.isfinite(good_scores).all()
    assert bad_scores.max() < 0.2
    assert rank_correlation(good_scores, -np.array(latencies)) > 0.8
    features, _ = make_candidates(40, 1)
    model = train((features, [np.inf] * 40))
    assert np.abs(model.score(features)).max() < 0.1
    features, latencies = make_candidates(40, 1)
    empty = np.zeros((0, COLUMNS), "float32")
    assert train((features, latencies)).score([empty, features[0]])[0] == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_to_rank(loss: str) -> None:
    """Taught 200 candidates of two groups on different scales, new ones of either are ranked (Spearman above 0.6)."""
    features, latencies = make_candidates(200, 1)
    groups = [
        SampleGroup(features[::2], latencies[::2]),
        SampleGroup(features[1::2], [1e3 * s for s in latencies[1::2]]),
    ]
    new, truth = make_candidates(100, 2)
    assert rank_correlation(Trees(groups, loss, 0, 1).score(new), -np.array(truth)) > 0.6


@pytest.mark.parametrize("loss", LOSSES)
def test_failed_candidates_rank_last(loss: str) -> None:
    """What failed by its own fault is below all that ran; scores stay finite even where everything failed."""
    features, latencies = make_candidates(60, 1)
    bad = [matrix + np.float32(3) for matrix in make_candidates(30, 3)[0]]
    trees = Trees([SampleGroup([*features, *bad], [*latencies, *[np.inf] * 30])], loss, 0, 1)
    assert np.median(trees.score(bad)) < np.median(trees.score(features))
    assert np.isfinite(Trees([SampleGroup(bad, [np.inf] * 30)], loss, 0, 1).score(bad)).all()


def test_a_group_of_little_weight_is_overruled() -> None:
    """Two groups that say the opposite of the same candidates: the one that counts more is followed."""
    features, latencies = make_candidates(150, 1)
    upside_down = [1e-5 / s for s in latencies]
    trees = Trees([SampleGroup(features, latencies, 1.0), SampleGroup(features, upside_down, 0.05)], "reg", 0, 1)
    new, truth = make_candidates(80, 2)
    assert rank_correlation(trees.score(new), -np.array(truth)) > 0.5
