"""Sampled tokens of the compiled round against the target's probabilities, with a wrong rule beside it."""

import dataclasses
import math
from collections.abc import Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.pairs import Pair
from flashspec.sampling import SamplingParams, inverse_cdf, probabilities
from flashspec.speculative import Verdict, init_state, round_step, rounds, verify_chain
from flashspec.speculative.drafters import last_token
from flashspec.speculative.loop import with_settings
from flashspec.speculative.rounds import propose
from flashspec.speculative.state import State

SHORTEST_PREFIX, LONGEST_PREFIX = 8, 24
# A total variation that is told apart from noise with some thousand draws.
CLEAR = 0.1
# The control needs no more than this share of the draws.
CONTROL_SHARE = 8
# The wrong rule's distance must exceed this many bounds.
CONTROL_OVER_BOUND = 2
# The share of the mass that one pool of rare tokens holds at most.
POOL = 1 / 8
SIMULATED_AT_ONCE = 50_000


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prefix with both models' distributions of the next token, in float32.

    Attributes:
      tokens: [P] ids.
      target_probs, draft_probs: [V], p and q.
    """

    tokens: np.ndarray
    target_probs: np.ndarray
    draft_probs: np.ndarray

    @property
    def control_distance(self) -> float:
        """Total variation from p of the wrong rule that draws from p after a rejection (33.5)."""
        return total_variation(self.control_probs, self.target_probs)

    @property
    def control_probs(self) -> np.ndarray:
        """[V], the law of that rule."""
        both = np.minimum(self.target_probs, self.draft_probs)
        return both + (1.0 - both.sum()) * self.target_probs

    @property
    def entropy(self) -> float:
        """Of p, in nats."""
        return float(-sum(p * math.log(p) for p in self.target_probs if p > 0))


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Beginnings of prompts that draws could be made after.

    Attributes:
      state: one row for each of them.
      prompts: [R], the prompt that each begins.
      prefixes: with both models' laws.
    """

    state: State
    prompts: list[int]
    prefixes: list[Prefix]

    def choose(self, count: int) -> list[int]:
        """The least certain rows at which the wrong rule shows, of different prompts as far as there are enough."""
        # The control must stand out of the noise; beyond that, a law over many tokens is the harder test.
        rows = range(len(self.prefixes))
        order = sorted(rows, key=lambda i: (self.prefixes[i].control_distance < CLEAR, -self.prefixes[i].entropy))
        by_prompt: dict[int, list[int]] = {}
        for row in order:
            by_prompt.setdefault(self.prompts[row], []).append(row)
        depth = max(map(len, by_prompt.values()), default=0)
        ranked = [found[rank] for rank in range(depth) for found in by_prompt.values() if rank < len(found)]
        return ranked[:count]


def find_candidates(
    pair: Pair, tokens: np.ndarray, lengths: np.ndarray, draft_length: int, rule: str, sampling: SamplingParams
) -> Candidates:
    """All beginnings of the prompts [B, P] with 8 to 24 tokens, or with all tokens of a shorter prompt."""
    longest = min(LONGEST_PREFIX, tokens.shape[1])
    ends = [
        (b, end) for b, size in enumerate(lengths) for end in range(min(SHORTEST_PREFIX, size), min(longest, size) + 1)
    ]
    prompts, sizes = [b for b, _ in ends], np.array([end for _, end in ends], np.int32)
    rows = tokens[prompts, :longest]
    state = init_state(
        jax.random.key(0),
        pair.target,
        pair.target_params,
        rows,
        sizes,
        drafter=pair.drafter,
        draft_length=draft_length,
        rule=rule,
        sampling=sampling,
        max_new_tokens=draft_length + 1,
    )
    target, draft = (np.asarray(probs, np.float64) for probs in jax.jit(next_token_laws)(state))
    prefixes = [Prefix(row[:size], *laws) for row, size, *laws in zip(rows, sizes, target, draft, strict=True)]
    return Candidates(state, prompts, prefixes)


def next_token_laws(state: State) -> tuple[Array, Array]:
    """p and q [R, V] of each row's next token, as a round computes them."""
    settings = state.settings
    proposal = propose(state, jnp.zeros((state.lengths.shape[0], settings.draft_length), jnp.float32))
    pending = last_token(state.tokens, state.lengths)[:, None]
    logits, _ = settings.target.logits(settings.target_params, pending, state.target_cache)
    return probabilities(logits[:, 0], settings.sampling)[0], proposal.probs[:, 0]


@dataclasses.dataclass(frozen=True)
class LawPlan:
    """How many draws: `rows` in one round, `dispatches` rounds at each prefix, `simulations` for the bound.

    The bound is the largest of the simulated distances, which estimates their quantile 1 - 1 / simulations.
    """

    rows: int
    dispatches: int
    simulations: int
    seed: int

    @property
    def draws(self) -> int:
        """At each prefix."""
        return self.rows * self.dispatches


@dataclasses.dataclass(frozen=True)
class Law:
    """Draws of the first token that a round emits at one prefix, against p.

    Attributes:
      prefix: its tokens.
      draws: n.
      tv: total variation between their frequencies and p, tokens with p < 1 / sqrt(n) pooled.
      bound: what the same statistic stays below for n draws from p itself.
      control_draws: fewer, as the control is far off.
      control_tv: as `tv`, with the residual replaced by the target.
      control_expected: what `control_tv` tends to.
    """

    prefix: list[int]
    draws: int
    tv: float
    bound: float
    control_draws: int
    control_tv: float
    control_expected: float

    @property
    def is_certain(self) -> bool:
        """Whether p leaves one token only, so that n draws from p itself never differ from it."""
        return self.bound == 0.0

    @property
    def in_bounds(self) -> float:
        """The distance as a multiple of the bound; of a certain token, 0 or infinity."""
        return self.tv / self.bound if self.bound else math.inf if self.tv else 0.0

    @property
    def shows_control(self) -> bool:
        """Whether the wrong rule must exceed `CONTROL_OVER_BOUND` times the bound here.

        Changing one draw of n moves a total variation by at most 1 / n, so it falls 2 / sqrt(n) short of its mean with
        a probability of at most exp(-8) (McDiarmid's inequality).
        """
        noise = 2 / math.sqrt(self.control_draws)
        return not self.is_certain and self.control_expected - noise > CONTROL_OVER_BOUND * self.bound


def measure_laws(
    pair: Pair,
    tokens: np.ndarray,
    lengths: np.ndarray,
    count: int,
    draft_length: int,
    rule: str,
    sampling: SamplingParams,
    plan: LawPlan,
) -> list[Law]:
    """Many first tokens through the compiled round, right and wrong, at `count` beginnings of the prompts.

    Args:
      pair: with float32 parameters.
      tokens: prompts [B, P].
      lengths: [B].
      count: at how many prefixes.
      draft_length: D of the round.
      rule: of verification.
      sampling: for both models.
      plan: how many draws.

    Returns:
      One law for each prefix.
    """
    candidates = find_candidates(pair, tokens, lengths, draft_length, rule, sampling)
    rows = candidates.choose(count)
    counts = draw_first_tokens(candidates.state, rows, plan)
    fewer = dataclasses.replace(plan, dispatches=-(-plan.dispatches // CONTROL_SHARE))
    # The control is the same round with one function exchanged.
    wrong = with_settings(candidates.state, dataclasses.replace(candidates.state.settings, rule="chain"))
    with mock.patch.object(rounds, "verify_chain", redraw_from_target):
        control = draw_first_tokens(wrong, rows, fewer)
    chosen = [candidates.prefixes[row] for row in rows]
    return [compare(*drawn, plan) for drawn in zip(chosen, counts, control, strict=True)]


def redraw_from_target(
    key: None, draft_tokens: Array, draft_probs: Array, target_probs: Array, *, uniforms: tuple[Array, Array]
) -> Verdict:
    """The wrong rule of section 33.5: after a rejection the token is drawn from p and not from the residual."""
    verdict = verify_chain(key, draft_tokens, draft_probs, target_probs, uniforms=uniforms)
    row = jnp.take_along_axis(target_probs, verdict.num_accepted[:, None, None], axis=1)[:, 0]
    return dataclasses.replace(verdict, next_token=inverse_cdf(row, uniforms[1]))


def compare(prefix: Prefix, counts: np.ndarray, control: np.ndarray, plan: LawPlan) -> Law:
    """The distances of right and wrong counts [V] from p, and the bound."""
    pooled, groups = pool(prefix.target_probs, plan.draws)
    return Law(
        prefix=prefix.tokens.tolist(),
        draws=plan.draws,
        tv=total_variation(counts @ groups / plan.draws, pooled),
        bound=simulated_bound(pooled, plan),
        control_draws=int(control.sum()),
        control_tv=total_variation(control @ groups / control.sum(), pooled),
        control_expected=total_variation(prefix.control_probs @ groups, pooled),
    )


def draw_first_tokens(state: State, rows: Sequence[int], plan: LawPlan) -> list[np.ndarray]:
    """For some rows of a state, counts [V] of a round's first token, over copies that differ in their keys only."""

    @jax.jit
    def count(state: State, row: Array, key: Array) -> Array:
        def dispatch(index: Array, counts: Array) -> Array:
            keys = jax.random.split(jax.random.fold_in(key, index), plan.rows)
            _, info = round_step(copies_of_row(state, row, keys))
            return counts.at[info.tokens[:, 0]].add(1)

        return lax.fori_loop(0, plan.dispatches, dispatch, jnp.zeros(state.settings.target.vocab_size, jnp.int32))

    keys = jax.random.split(jax.random.key(plan.seed + 1), len(rows))
    return [np.asarray(count(state, jnp.int32(row), key)) for row, key in zip(rows, keys, strict=True)]


def copies_of_row(state: State, row: Array, keys: Array) -> State:
    """One row of a state as many times as there are keys [C], each copy with its own."""

    def repeat(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf[row], (keys.shape[0], *leaf.shape[1:]))

    settings = dataclasses.replace(
        state.settings,
        keys=keys,
        prompt_lengths=repeat(state.settings.prompt_lengths),
        min_lengths=repeat(state.settings.min_lengths),
        max_lengths=repeat(state.settings.max_lengths),
    )
    return with_settings(jax.tree.map(repeat, with_settings(state, None)), settings)


def pool(probs: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Group the tokens with p < 1 / sqrt(n): the pooled probabilities [C] and the map [V, C] from tokens to groups.

    One pool of them all would hide everything where a law is flat, so a pool ends at `POOL` of the mass.
    """
    probs = probs / probs.sum()
    is_rare = probs < draws**-0.5
    rare = np.where(is_rare, probs, 0.0)
    pools = ((np.cumsum(rare) - rare / 2) / POOL).astype(int)
    own = np.flatnonzero(~is_rare)
    columns = np.where(is_rare, own.size + pools, 0)
    columns[own] = np.arange(own.size)
    groups = np.zeros((probs.size, columns.max() + 1))
    groups[np.arange(probs.size), columns] = 1.0
    return probs @ groups, groups


def total_variation(frequencies: np.ndarray, probs: np.ndarray) -> float:
    """Half the sum of absolute differences."""
    return float(np.abs(frequencies - probs).sum() / 2)


def simulated_bound(probs: np.ndarray, plan: LawPlan) -> float:
    """The largest total variation from p [C] of `plan.simulations` samples of n draws from p itself."""
    generator = np.random.default_rng(plan.seed)
    starts = range(0, plan.simulations, SIMULATED_AT_ONCE)
    sizes = [min(SIMULATED_AT_ONCE, plan.simulations - start) for start in starts]
    samples = (generator.multinomial(plan.draws, probs, size=size) for size in sizes)
    return max(float(np.abs(sample / plan.draws - probs).sum(axis=1).max() / 2) for sample in samples)
