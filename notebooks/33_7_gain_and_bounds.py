# %% [markdown]
# # 33.7 What speculation gains, and what a window changes
#
# How many tokens a round commits (eq. 33.14), what that is worth at given costs (eq. 33.15), how to average, and how
# far an output moves when keys are dropped (eq. 33.16).

# %%
import json
from fractions import Fraction
from pathlib import Path

import ipywidgets
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import experiments
from flashspec import dot_product_attention, verify_chain
from flashspec.costs import (
    RoundCosts,
    best_draft_length,
    dropped_mass,
    estimate_round,
    expected_tokens,
    speculative_speedup,
    survival,
    time_per_token,
    window_error_bound,
)
from flashspec.measure import acceptance_statistics

# %% [markdown]
# ## Tokens of a round (eq. 33.14)
#
# At least $i+1$ tokens are committed when the first $i$ drafts are accepted. If each is accepted with probability
# $\alpha$, given that those before it were,
#
# $$\mathbb{E}[N]=\sum_{i=0}^{k}\Pr(N\ge i+1)=\sum_{i=0}^{k}\alpha^i=\frac{1-\alpha^{k+1}}{1-\alpha}. \tag{33.14}$$
#
# The chapter's case: $\alpha=\tfrac45$, $k=3$.

# %%
N = expected_tokens(Fraction(4, 5), 3)
wrong_N = 1 + 3 * Fraction(4, 5)  # as if every draft were tested
print(f"E[N] = {N} = {float(N)}; if every draft were tested, {float(wrong_N)}")
assert Fraction(369, 125) == N
assert wrong_N != N
assert expected_tokens(1, 3) == 4
assert expected_tokens(0, 3) == 1

# %% [markdown]
# The sum, not the quotient: at $\alpha=1$ the quotient is $0/0$. A measured acceptance may well be 1, and float32 does
# not tell $1-10^{-9}$ from it.

# %%
by_sum = expected_tokens(1 - 1e-9, 3)
alpha = jnp.float32(1 - 1e-9)
wrong_quotient = (1 - alpha**4) / (1 - alpha)
print(f"alpha = 1 - 1e-9: sum {by_sum:.9f}, quotient in float32 {wrong_quotient}")
assert abs(by_sum - 4) < 1e-8
assert jnp.isnan(wrong_quotient)

# %% [markdown]
# ## Which acceptance may be put into powers
#
# The conditional one: of the drafts at a position that were *tested*, how many were accepted. The share of accepted
# among *proposed* drafts counts those after a rejection as rejected. At $\alpha=\tfrac45$, $k=3$ it is
# $(\mathbb{E}[N]-1)/3=\tfrac{244}{375}$, and in powers it gives another number.

# %%
share = (N - 1) / 3
wrong_N = expected_tokens(share, 3)
print(f"accepted / proposed = {share}; in powers {float(wrong_N):.4f} instead of {float(N)}")
assert share == Fraction(244, 375)
assert abs(float(wrong_N) - 2.3495) < 1e-4

# %% [markdown]
# The same from counts, as a run has them. A hundred thousand rounds of `verify_chain` with three drafts, on laws whose
# acceptance is 0.9, 0.7 and 0.5 by position (exercise 33.10):

# %%
conditional = [0.9, 0.7, 0.5]
rounds = 100_000
p = jnp.array([[a, 1 - a] for a in [*conditional, 1.0]], jnp.float32)  # the draft always says 0, so A = p(0)
q = jnp.broadcast_to(jnp.array([1.0, 0.0]), (rounds, 3, 2))
verdict = verify_chain(jax.random.key(0), jnp.zeros((rounds, 3), jnp.int32), q, jnp.broadcast_to(p, (rounds, 4, 2)))
counts = acceptance_statistics(np.asarray(verdict.accepted).sum(0), np.asarray(verdict.tested).sum(0))
mean_tokens = float(np.mean(np.asarray(verdict.num_accepted) + 1))
predicted = float(expected_tokens([Fraction(9, 10), Fraction(7, 10), Fraction(1, 2)]))
wrong_prediction = float(expected_tokens(sum(conditional) / 3, 3))
print(f"conditional acceptance {[round(rate, 2) for rate in counts.conditional]}")
print(
    f"tokens a round {mean_tokens:.2f}; by survival {predicted:.3f}; mean acceptance in powers {wrong_prediction:.3f}"
)
assert np.allclose(counts.conditional, conditional, atol=0.01)
assert np.allclose(counts.survival, [float(s) for s in survival(conditional)[1:]], atol=0.01)
assert abs(mean_tokens - predicted) < 0.02
assert abs(mean_tokens - wrong_prediction) > 0.2

# %% [markdown]
# And from the kept run of the main job on an H200 (`python -m experiments speculative`):

# %% tags=["varies"]
kept = json.loads((Path(experiments.__file__).parent / "results" / "speculative" / "report.json").read_text())
rates, drafts = kept["acceptance_by_position"], kept["draft_length"]
by_survival = expected_tokens(rates)
wrong_by_share = expected_tokens((kept["tokens_per_round"] - 1) / drafts, drafts)
print(f"{kept['device']}: {kept['tokens_per_round']:.2f} tokens a round measured")
print(f"by survival {by_survival:.2f} (no budget, no stop tokens); by accepted / proposed {wrong_by_share:.2f}")
assert abs(by_survival - kept["tokens_per_round"]) < 0.15
assert abs(wrong_by_share - kept["tokens_per_round"]) > 0.5

# %% [markdown]
# ## The speed-up (eq. 33.15)
#
# $$S\approx\frac{c_t\,\mathbb{E}[N]}{k\,c_d+c_v(k)+c_m} \tag{33.15}$$
#
# with one target step $c_t$, one draft forward $c_d$, one verification $c_v$, and the round's own costs $c_m$. The
# chapter's numbers, in milliseconds: $c_t=10$, $c_d=c_m=1$, and $c_v=12$ or $30$. A loop that keeps both caches
# aligned runs $k+1$ draft forwards, as this library's does, and pays for one more.

# %%
cheap, dear = (RoundCosts(target_step=10, draft_step=1, verify=verify, overhead=1) for verify in (12, 30))
alpha = Fraction(4, 5)
for name, costs in (("c_v = 12", cheap), ("c_v = 30", dear)):
    chapter = speculative_speedup(alpha, 3, costs, draft_forwards=3)
    ours = speculative_speedup(alpha, 3, costs)
    print(f"{name}: {chapter} = {float(chapter):.3f} with k forwards, {ours} = {float(ours):.3f} with k + 1")
assert speculative_speedup(alpha, 3, cheap, draft_forwards=3) == Fraction(369, 200)
assert speculative_speedup(alpha, 3, dear, draft_forwards=3) == Fraction(369, 425)
assert speculative_speedup(alpha, 3, cheap) == Fraction(738, 425)
assert speculative_speedup(alpha, 3, dear) == Fraction(738, 875)
wrong_gain = expected_tokens(alpha, 3)  # tokens a round are not the speed-up
assert wrong_gain > speculative_speedup(alpha, 3, cheap)

# %% [markdown]
# Acceptance and draft length together. The thick line is break-even: below it, speculation is slower than plain
# decoding. With every further draft the verification reads one more token, which costs little where memory bounds it.


# %%
def draw(draft_step=0.1, more_per_token=0.05, overhead=0.1):
    """Speed-up over acceptance and draft length; costs in target steps."""
    costs = RoundCosts(1.0, draft_step, lambda D: 1.0 + more_per_token * D, overhead)
    alphas, lengths = np.linspace(0.3, 0.98, 50), range(1, 13)
    values = np.array([[speculative_speedup(float(a), D, costs) for D in lengths] for a in alphas])
    figure, axes = plt.subplots(figsize=(7, 4.2))
    shown = axes.contourf(lengths, alphas, values, levels=np.arange(0, 5.1, 0.25), cmap="RdYlGn", extend="max")
    axes.contour(lengths, alphas, values, levels=[1.0], colors="black", linewidths=3)
    axes.plot([], [], "k", linewidth=3, label="break-even")
    best = [best_draft_length(float(a), costs, draft_lengths=lengths).draft_length for a in alphas]
    axes.plot(best, alphas, "k:", label="best length")
    axes.set(xlabel="draft length D", ylabel="conditional acceptance", title="speed-up by eq. 33.15")
    axes.legend(loc="lower right")
    figure.colorbar(shown)


draw()

# %% [markdown]
# With a running kernel:

# %%
ipywidgets.interact(draw, draft_step=(0.0, 0.5, 0.02), more_per_token=(0.0, 0.5, 0.01), overhead=(0.0, 0.5, 0.02))

# %% [markdown]
# The best length is found by trying all: measured $c_v$ is a staircase, and a search that stops at the first fall
# misses what comes after the step.

# %%
stairs = RoundCosts(10, 1, {1: 10, 2: 10, 3: 10, 4: 15, 5: 15, 6: 15, 7: 15}, 0)
best = best_draft_length(0.95, stairs)
speedups = {D: float(estimate_round(0.95, D, stairs).speedup) for D in range(1, 8)}
wrong_length = next(D for D in range(1, 7) if speedups[D + 1] < speedups[D])
print({D: round(s, 3) for D, s in speedups.items()})
print(f"best {best.draft_length}; the first fall comes after {wrong_length}")
assert best.draft_length == max(speedups, key=speedups.get)
assert wrong_length != best.draft_length

# %% [markdown]
# ## Averages of rounds
#
# Long-run time a token is the ratio of sums. The mean of the rounds' own ratios is another number, and nobody's
# waiting time: it weighs a round of one token as much as one of five.

# %%
times, tokens = [12, 12], [1, 5]
right = time_per_token(times, tokens)
wrong_mean = sum(t / n for t, n in zip(times, tokens, strict=True)) / 2
print(f"{right} ms a token; mean of the ratios {wrong_mean}")
assert right == 4
assert wrong_mean == 7.2

# %% [markdown]
# ## Dropping keys (eq. 33.16)
#
# Full attention puts the probability $\delta$ on keys outside of a window. Write its output as
# $o=(1-\delta)\,o'+\delta\,o_\text{drop}$, where $o'$ is the output over the kept keys, renormalised. Then
# $o-o'=\delta\,(o_\text{drop}-o')$, and if no value is longer than $M$
#
# $$\|o-o'\|\le2\delta M,\qquad\delta<1. \tag{33.16}$$
#
# The factor 2 is needed: with the value 1 kept and $-1$ dropped, the bound is reached.

# %%
scores = jnp.log(jnp.array([3 / 4, 1 / 4]))[None, None, None, :]  # as a bias: the dropped key has the mass 1/4
value = jnp.array([1.0, -1.0])[None, :, None, None]
zeros = jnp.zeros((1, 2, 1, 1))
full = dot_product_attention(zeros[:, :1], zeros, value, scores)[0, 0, 0, 0]
windowed = dot_product_attention(zeros[:, :1], zeros[:, :1], value[:, :1], scores[..., :1])[0, 0, 0, 0]
delta = dropped_mass([Fraction(3, 4), Fraction(1, 4)], [True, False])
error, bound = float(abs(full - windowed)), window_error_bound(delta, 1)
wrong_bound = bound / 2  # delta M, "what was dropped"
print(f"error {error:g}, bound {bound}")
assert bound == Fraction(1, 2)
assert np.isclose(error, float(bound))
assert error > wrong_bound

# %% [markdown]
# $\delta$ need not be guessed: `dropped_mass` sums it from the probabilities. And without any probabilities, attention
# returns the log-normaliser of a row, and the kept share of the mass is
# $e^{\text{lse}_\text{window}-\text{lse}_\text{full}}$. Below, every query of random attention at many windows; and
# the same with one distant key that every query likes, as the first token of a text often is. **That keys are far away
# does not make their mass small.**

# %%
T = 96
keys = jax.random.split(jax.random.key(0), 3)
query, key, value = (jax.random.normal(k, (1, T, 2, 16)) for k in keys)
M = float(jnp.linalg.norm(value, axis=-1).max())
liked = jnp.zeros((1, 1, T, T)).at[..., 0].set(6.0)


@jax.jit
def full_attention(bias):
    """Output and log-normaliser of all visible keys."""
    return dot_product_attention(query, key, value, bias, is_causal=True, return_lse=True)


def one_window(bias, left):
    """(dropped mass, error) of every query and head."""
    o, lse = full_attention(bias)
    o_window, lse_window = dot_product_attention(
        query, key, value, bias, is_causal=True, window=(left, None), return_lse=True
    )
    delta = np.clip(1 - np.exp(np.asarray(lse_window - lse, np.float64)), 0, 1)
    return delta.ravel(), np.linalg.norm(np.asarray(o - o_window), axis=-1).ravel()


figure, axes = plt.subplots(figsize=(7, 4))
for name, bias in (("random keys", jnp.zeros((1, 1, T, T))), ("one distant key that all like", liked)):
    deltas, errors = np.concatenate([one_window(bias, left) for left in (4, 16, 48)], axis=1)
    axes.plot(deltas, errors, ".", ms=3, label=name)
    for delta, error in zip(deltas, errors, strict=True):
        assert delta == 1 or error <= window_error_bound(delta, M) + 1e-5
axes.plot([0, 1], [0, 2 * M], "k-", label="2 delta M")
axes.set(xlabel="delta, dropped probability", ylabel="error of the output", title="eq. 33.16 holds for every row")
axes.legend()
dropped = one_window(liked, 48)[0].reshape(T, 2)[49:]  # the queries that no longer see the first key
wrong_far = 0.05  # "more than half of the text away, hence negligible"
print(f"a window of 48 drops {np.median(dropped):.0%} of the mass where the first key is liked")
assert np.median(dropped) > 10 * wrong_far

# %% [markdown]
# It is a bound for one row of one layer. Later layers and the sampling may amplify an error, so it promises nothing
# about the quality of a task. A model trained with a window drops nothing at all: its window *is* its operator, and is
# exact.

# %%
try:
    window_error_bound(1, M)
    wrong_claim = True
except ValueError as error:
    wrong_claim = False
    print(error)
assert not wrong_claim
