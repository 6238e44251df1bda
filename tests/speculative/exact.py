"""The exact law of what a verification rule emits, computed through the rule itself.

The rule is a deterministic function of drafts and uniforms, and piecewise constant in the uniforms. So its law is a
finite sum: over all drafts, weighted by q, and over the cells between the uniforms' breakpoints, weighted by their
widths. All terms are rows of one batch.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Tables(NamedTuple):
    """Conditional laws by depth: target[d] has shape [V] * d + [V], draft[d] likewise, one depth fewer."""

    target: Sequence[np.ndarray]
    draft: Sequence[np.ndarray]

    @property
    def draft_length(self) -> int:
        return len(self.draft)

    @property
    def vocab(self) -> int:
        return self.target[0].shape[0]


def quarters(seed: int, vocab: int, draft_length: int) -> Tables:
    """Random tables of multiples of 1/4, zeros and disjoint supports among them.

    Ratios and normalised residuals of such laws, right or wrong, are multiples of 1/12: a grid of 12 cells is exact.
    """
    rng = np.random.default_rng(seed)

    def laws(depth: int) -> np.ndarray:
        return rng.multinomial(4, np.full(vocab, 1 / vocab), size=(vocab,) * depth) / 4

    return Tables([laws(d) for d in range(draft_length + 1)], [laws(d) for d in range(draft_length)])


def target_law(target: Sequence[np.ndarray]) -> np.ndarray:
    """Joint law of the first len(target) tokens, [V, ..., V]."""
    joint = np.ones(())
    for law in target:
        joint = joint[..., None] * law
    return joint


def grid(cells: int) -> np.ndarray:
    """Breakpoints of `cells` equal cells."""
    return np.arange(1, cells) / cells


def split(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints and widths of the cells of [0, 1) between breakpoints [..., K]: two arrays [..., K + 1]."""
    ends = np.zeros((*points.shape[:-1], 1)), np.ones((*points.shape[:-1], 1))
    edges = np.concatenate([ends[0], np.sort(points, axis=-1), ends[1]], axis=-1)
    return (edges[..., 1:] + edges[..., :-1]) / 2, np.diff(edges, axis=-1)


def coin_points(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Breakpoint of each coin: p / q where below 1, else q / p, so that an inverted ratio is integrated exactly too."""
    low, high = np.minimum(p, q), np.maximum(p, q)
    return np.where(high > 0, low / np.where(high > 0, high, 1), 1.0)


def residual_points(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """Breakpoints of the next token's draw: the cdfs of all residuals and of the bonus, [..., (D + 1) V]."""
    weights = np.maximum(target - np.concatenate([draft, np.zeros_like(target[..., :1, :])], -2), 0)
    weights = np.where(weights.sum(-1, keepdims=True) > 0, weights, target)
    cdf = np.cumsum(weights, -1) / weights.sum(-1, keepdims=True)
    return np.clip(cdf.reshape(*cdf.shape[:-2], -1), 0, 1)


class Rows(NamedTuple):
    """All drafts of the tables, with the laws that belong to them and their probabilities."""

    drafts: np.ndarray
    draft: np.ndarray
    target: np.ndarray
    weight: np.ndarray


def all_drafts(tables: Tables) -> Rows:
    drafts = np.array(list(itertools.product(range(tables.vocab), repeat=tables.draft_length)), np.int32)
    drafts = drafts.reshape(-1, tables.draft_length)
    draft, target = (after_drafts(laws, drafts, tables.vocab) for laws in (tables.draft, tables.target))
    drawn = np.take_along_axis(draft, drafts[..., None], -1)[..., 0]
    return Rows(drafts, draft, target, drawn.prod(-1))


def after_drafts(laws: Sequence[np.ndarray], drafts: np.ndarray, vocab: int) -> np.ndarray:
    """Conditional laws along each row of drafts, [rows, len(laws), V]."""
    found = np.empty((len(drafts), len(laws), vocab))
    for depth, law in enumerate(laws):
        found[:, depth] = law[tuple(drafts[:, :depth].T)]
    return found


def chain_law(
    verify: Callable, tables: Tables, points: np.ndarray | None = None, dtype=jnp.float32, reported=None
) -> np.ndarray:
    """Joint law [V, ..., V] of the first D + 1 tokens under a chain rule; what a round leaves open follows p.

    Args:
      verify: takes (drafts, q, p, accept, final), returns (num_accepted, next_token).
      tables: the laws.
      points: breakpoints of the final draw, for all rows; the residuals' own when None.
      dtype: of the arrays that the rule sees.
      reported: the draft laws that the rule is told, when it is told others than the drafts are drawn from.
    """
    rows = all_drafts(tables)
    told = rows if reported is None else all_drafts(tables._replace(draft=reported))
    drawn = [np.take_along_axis(law, rows.drafts[..., None], -1)[..., 0] for law in (rows.target[:, :-1], told.draft)]
    coins, coin_widths = split(coin_points(*drawn)[..., None])
    final_points = (
        residual_points(rows.target, told.draft) if points is None else np.tile(points, (len(rows.drafts), 1))
    )
    finals, final_widths = split(final_points)

    depth = tables.draft_length
    choice = np.array(list(itertools.product(range(2), repeat=depth)), int).reshape(-1, depth)
    x, c, f = (a.ravel() for a in np.indices((len(rows.drafts), len(choice), finals.shape[1])))
    position = np.arange(depth)
    accept = coins[x[:, None], position, choice[c]]
    weight = rows.weight[x] * coin_widths[x[:, None], position, choice[c]].prod(-1) * final_widths[x, f]
    floats = (jnp.asarray(a, dtype) for a in (told.draft[x], rows.target[x], accept, finals[x, f]))
    num_accepted, next_token = map(np.asarray, verify(jnp.asarray(rows.drafts[x]), *floats))
    return completed(tables, rows.drafts[x], num_accepted, next_token, weight)


def match_law(verify: Callable, tables: Tables, cells: int) -> np.ndarray:
    """The same for a rule that takes (drafts, p, uniforms [B, D + 1]), with a grid of equal cells for each uniform."""
    rows, depth = all_drafts(tables), tables.draft_length
    choice = np.array(list(itertools.product(range(cells), repeat=depth + 1)))
    x, c = (a.ravel() for a in np.indices((len(rows.drafts), len(choice))))
    uniforms = (choice[c] + 0.5) / cells
    target, uniforms = jnp.asarray(rows.target[x], jnp.float32), jnp.asarray(uniforms, jnp.float32)
    num_accepted, next_token = map(np.asarray, verify(jnp.asarray(rows.drafts[x]), target, uniforms))
    return completed(tables, rows.drafts[x], num_accepted, next_token, rows.weight[x] / len(choice))


def completed(tables, drafts, num_accepted, next_token, weight) -> np.ndarray:
    """Joint law of D + 1 tokens: the emitted ones of each row, then the target's own."""
    depth, vocab = tables.draft_length, tables.vocab
    assert ((next_token >= 0) & (next_token < vocab)).all()
    total = np.zeros((vocab,) * (depth + 1))
    for count in range(depth + 1):
        rows = num_accepted == count
        mass = np.zeros((vocab,) * (count + 1))
        np.add.at(mass, (*drafts[rows, :count].T, next_token[rows]), weight[rows])
        for law in tables.target[count + 1 :]:
            mass = mass[..., None] * law
        total += mass
    return total
