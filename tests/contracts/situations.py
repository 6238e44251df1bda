"""Configurations of the loop over the history model, with laws that the grid of `round_law` integrates exactly."""

import dataclasses
import itertools

import numpy as np

from flashspec.speculative import ModelDrafter, NgramDrafter, ShallowDrafter
from tests.contracts.round_law import Case, Cells, Start
from tests.table_models import ROWS, Rules, history, log, random_laws

LEFT = 2  # the window of models that run over a window cache


def laws(seed, draft_length, vocab, stop=None):
    """Target and draft laws whose breakpoints lie on `cells`: the fewer drafts, the finer."""
    target, draft = {1: (4, 4), 2: (4, 2)}.get(draft_length, (2, 2)) if stop is None else (2, 2)
    return random_laws(seed, ROWS, vocab, target, stop), random_laws(seed + 1, ROWS, vocab, draft)


def cells(rule, draft_length, drafter):
    """Quarters make twelfths as ratios and as residuals; halves make halves."""
    fine = {"chain": {1: (4, 12, 12), 2: (2, 4, 12)}, "match": {1: (4, 4, 4), 2: (2, 4, 4)}, "greedy": {1: (4, 1, 1)}}
    coarse = (2, 1, 1) if rule == "greedy" else (2, 2, 2)
    draft, accept, final = fine[rule].get(draft_length, coarse)
    return Cells(1 if drafter == "ngram" else draft, accept, final)


def case_of(draft_length, cache, draft_cache, rule, drafter, vocab, tables, starts, draft_rules=None):
    """A configuration over the given logits of target and draft."""
    like = np.full((ROWS, vocab), 1 / vocab)
    target = history(like, cache, LEFT if cache == "window" else None, draft_length)
    target = dataclasses.replace(target, table=tables[0])
    draft = history(like, draft_cache, LEFT if draft_cache == "window" else None, draft_length)
    draft = dataclasses.replace(draft, table=tables[1])
    if drafter == "ngram":
        draft, proposes = None, NgramDrafter(2)
    else:
        proposes = {"model": ModelDrafter, "shallow": ShallowDrafter}[drafter](draft.model, draft.params)
    if rule == "greedy":
        starts = [start._replace(rules=dataclasses.replace(start.rules, temperature=0.0)) for start in starts]
    grid = cells(rule, draft_length, drafter)
    return Case(target, draft, proposes, rule, draft_length, grid, starts, draft_rules)


PROMPTS = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 1, 1), (1, 0, 1))


def starts_of(draft_length, min_new=(0,), **rules):
    """Rows of different prompts, budgets and minimum lengths, which share their batches.

    Budgets end inside of a round, at its end with all drafts accepted, and after it.
    """
    budgets = itertools.cycle((max(draft_length + 1, 3), 2, 3, 1, 2))
    return [
        Start(prompt, Rules(max_new=budget, min_new=min(budget, least), **rules))
        for prompt, budget, least in zip(PROMPTS, budgets, itertools.cycle(min_new), strict=False)
    ]


def freely(combination):
    """No stop tokens."""
    draft_length, *_, vocab = combination
    target, draft = laws(1, draft_length, vocab)
    return case_of(*combination, (log(target), log(draft)), starts_of(draft_length))


def with_stop_tokens(combination):
    """A stop token, minimum lengths, and a draft that is broken after some prefixes."""
    draft_length, *_, vocab = combination
    target, draft = laws(3, draft_length, vocab, stop=vocab - 1)
    draft = log(draft)
    draft[5] = np.nan
    starts = starts_of(draft_length, min_new=(0, 2, 0, 1), stop=(vocab - 1,))
    return case_of(*combination, (log(target), draft), starts)


def at_temperatures(combination):
    """Target and draft at different temperatures and biases, chosen so that the laws sampled from are on the grid."""
    draft_length, *_, vocab = combination
    target, draft = laws(5, draft_length, vocab)
    bias, draft_bias = np.linspace(-1, 1, vocab), np.linspace(2, 0, vocab)
    tables = 0.5 * log(target) - bias, 2.0 * log(draft) - draft_bias
    starts = starts_of(draft_length, temperature=0.5, bias=tuple(bias))
    return case_of(*combination, tables, starts, Rules(max_new=1, temperature=2.0, bias=tuple(draft_bias)))
