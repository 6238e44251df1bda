"""What experiments with set acceptance share: the acceptance that comes out, and the bytes that a step must read."""

import jax
import numpy as np
import pytest

from experiments.bandwidth_bound import step_bytes
from experiments.ruled_models import SMOKE, abstract, accepted_as_set, draft_logits


@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
def test_the_law_of_a_draft_is_accepted_as_set(acceptance: float) -> None:
    """sum_x min(p, q) against a uniform p (eq. 33.11)."""
    q = np.asarray(jax.nn.softmax(draft_logits(1000, acceptance)), float)
    assert np.minimum(q, 1 / 1000).sum() == pytest.approx(acceptance, abs=1e-6)


def test_acceptance_is_judged_by_its_spread() -> None:
    assert accepted_as_set(810, 1000, 0.8)
    assert not accepted_as_set(860, 1000, 0.8)
    assert accepted_as_set(86, 100, 0.8), "fewer drafts say less"


@pytest.mark.parametrize("role", SMOKE)
def test_a_step_reads_every_matrix_but_untied_embeddings(role: str) -> None:
    config = SMOKE[role]
    shapes = abstract(config)
    elements = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    if not config.tie_embeddings:
        elements -= shapes["embed"].size
    cache = 2 * 3 * 7 * config.num_layers * config.num_kv_heads * config.head_dim
    assert step_bytes(config, 3, 7) == 2 * (elements + cache)
    assert step_bytes(config, 3, 7) != 2 * (elements + cache // 2), "keys alone"
