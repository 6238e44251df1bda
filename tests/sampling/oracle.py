"""The sampling contract for one position, in float64 and plain Python, token by token."""

import math
from typing import Any

import numpy as np


def distribution(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    bias: list[float] | None = None,
    allowed: list[bool] | None = None,
    suppress: list[bool] | None = None,
) -> tuple[np.ndarray, float]:
    """The probabilities, and how far the nearest decision was from going the other way (relative; 0 is a tie)."""
    size = len(logits)
    biased = [z + (bias[i] if bias is not None else 0.0) for i, z in enumerate(logits)]
    for i in range(size):
        if (allowed is not None and not allowed[i]) or (suppress is not None and suppress[i]):
            biased[i] = -math.inf
    largest = max(biased)
    if temperature == 0:
        return np.eye(size)[biased.index(largest)], math.inf
    weights = [math.exp((z - largest) / temperature) for z in biased]
    order = sorted(range(size), key=lambda i: (-biased[i], i))
    kept, margin = (order[:top_k] if 0 < top_k < size else order), math.inf
    if top_p < 1:
        total, mass, count = sum(weights[i] for i in kept), 0.0, 0
        for i in kept:
            margin = min(margin, abs(mass / total - top_p))
            if mass >= top_p * total:
                break
            mass, count = mass + weights[i], count + 1
        kept = kept[:count]
    if min_p > 0:
        margin = min([margin, *(abs(weights[i] - min_p) for i in kept)])
        kept = [i for i in kept if weights[i] >= min_p]
    probs = np.zeros(size)
    probs[kept] = [weights[i] for i in kept]
    return probs / probs.sum(), margin


def rows(count: int, size: int, seed: int) -> dict[str, Any]:
    """Random positions with every setting different; logits on a coarse grid, so that ties are common."""
    rng = np.random.default_rng(seed)
    allowed = rng.random((count, size)) < 0.8
    allowed[np.arange(count), rng.integers(size, size=count)] = True
    suppress = (rng.random((count, size)) < 0.2) & ~np.eye(size, dtype=bool)[allowed.argmax(axis=1)]
    # Both signs of zero are one logit.
    logits = np.where(rng.random((count, size)) < 0.5, 1, -1) * rng.integers(0, 5, (count, size)) / 2
    return {
        "logits": logits.astype(np.float32),
        "temperature": rng.choice([0, 0.25, 0.7, 1, 3], count).astype(np.float32),
        "top_k": rng.integers(0, size + 2, count).astype(np.int32),
        "top_p": rng.choice([1, 0.2, 0.55, 0.83, 0.97], count).astype(np.float32),
        "min_p": rng.choice([0, 0, 0.03, 0.3], count).astype(np.float32),
        "bias": rng.choice([0, 0, 0.5, -1], (count, size)).astype(np.float32),
        "allowed": allowed,
        "suppress": suppress,
    }
