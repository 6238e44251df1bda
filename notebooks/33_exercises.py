# %% [markdown]
# # Exercises 33.1 to 33.13
#
# The question in a line, a derivation, and a cell that checks it, with the answer that a wrong rule gives beside it.
# Exact where the numbers are: `Fraction`s go into the cost models and come out again.

# %%
import itertools
import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashspec import (
    LanguageModel,
    ModelDrafter,
    SamplingParams,
    acceptance_probability,
    acceptance_rate,
    dot_product_attention,
    finalize,
    init_state,
    merge,
    output_law,
    probabilities,
    residual_distribution,
    rollback,
    round_step,
)
from flashspec.costs import (
    amdahl_speedup,
    dropped_mass,
    expected_tokens,
    net_benefit,
    pays_off,
    time_per_token,
    window_error_bound,
)
from flashspec.online_softmax import empty_stats, stats_of
from flashspec.specialize import should_precompile
from flashspec.speculative import Draws

# %% [markdown]
# ## Exercise 33.1: merging three blocks
#
# *Derive the three-block form of the merge, and say why the order does not matter in exact arithmetic.*
#
# With $m=\max(m_1,m_2,m_3)$, $\ell=\sum_ie^{m_i-m}\ell_i$ and $u=\sum_ie^{m_i-m}u_i$. Putting in the definitions,
# $e^{m_i-m}\sum_{j\in A_i}e^{z_j-m_i}=\sum_{j\in A_i}e^{z_j-m}$: each is the finite sum over the union, which has no
# order. (The printed answer writes $s_j$ for $z_j$.) Example 25.1 as three blocks, in all orders and bracketings:

# %%
z, v = jnp.log(jnp.array([2.0, 1.0, 6.0])), jnp.array([[1.0], [4.0], [5.0]])
blocks = [stats_of(z[i : i + 1], v[i : i + 1]) for i in range(3)]
results = []
for a, b, c in itertools.permutations(blocks):
    for whole in (merge(merge(a, b), c), merge(a, merge(b, c))):
        results.append([float(whole.m), float(whole.l), float(whole.u[0])])
print(f"{len(results)} ways: m = log {math.exp(results[0][0]):.0f}, l = {results[0][1]:g}, u = {results[0][2]:g}")
assert np.allclose(results, [math.log(6), 3 / 2, 6])
wrong_l = sum(float(block.l) for block in blocks)  # without the factors e^(m_i - m)
assert not np.isclose(wrong_l, 3 / 2)

# %% [markdown]
# ## Exercise 33.2: blocks are not equal
#
# *Two blocks with different outputs and unequal masses: the right merge beside the mean of the outputs.*
#
# Masses 1 and 3, values 0 and 4: $o=\frac{1\cdot0+3\cdot4}{4}=3$. The weight of a block is its share of the
# denominator, not one over the number of blocks.

# %%
A, B = (stats_of(jnp.log(jnp.array([mass])), jnp.array([[value]])) for mass, value in ((1.0, 0.0), (3.0, 4.0)))
right = float(finalize(merge(A, B))[0][0])
wrong_mean = float(finalize(A)[0][0] + finalize(B)[0][0]) / 2
print(f"merged: {right:g}; mean of the outputs: {wrong_mean:g}")
assert np.isclose(right, 3)
assert np.isclose(wrong_mean, 2)

# %% [markdown]
# ## Exercise 33.3: a hidden block and a hidden row
#
# *How do they differ, and which initialisation never subtracts infinities?*
#
# A hidden block adds nothing and is skipped. A hidden row has no keys in any block; eq. 33.2 is then undefined, and
# the interface decides. Start from an explicit "empty"; the first block that is not empty is taken as it is, and later
# ones are merged. No probability is made up for an empty row: its output is 0 and its $\ell$ is 0.

# %%
hidden = stats_of(z, v, visible=jnp.zeros(3, bool))
start = empty_stats((), 1)
for merged in (merge(hidden, blocks[0]), merge(start, blocks[0]), merge(blocks[0], hidden)):
    same = (np.array_equal(x, y) for x, y in zip(jax.tree.leaves(merged), jax.tree.leaves(blocks[0]), strict=True))
    assert all(same)
row = merge(start, hidden)
output, lse = finalize(row)
print(f"empty row: nonempty = {bool(row.nonempty)}, l = {float(row.l):g}, output = {float(output[0]):g}, lse = {lse}")
assert not row.nonempty
assert output[0] == 0
wrong_factor = jnp.exp(start.m - jnp.maximum(start.m, hidden.m))
assert jnp.isnan(wrong_factor)
wrong_uniform = float(v.mean())  # "all scores are equal, so the weights are": a probability made up
assert wrong_uniform != output[0]

# %% [markdown]
# ## Exercise 33.4 (optional): the subtracted mean
#
# *From the Jacobian of softmax, derive the subtracted sum of eq. 33.7.*
#
# $\partial p_i/\partial s_j=p_i(\delta_{ij}-p_j)$, so the Jacobian is $\operatorname{diag}(p)-pp^\mathsf{T}$ and
# $g_s=p\odot(g_p-\langle p,g_p\rangle\mathbf{1})$. In attention $g_{p,j}=g_o^\mathsf{T}v_j$, whose mean under $p$ is
# $g_o^\mathsf{T}o$. Moving all scores together changes nothing, hence $\sum_jg_{s,j}=0$. With
# $p=(\tfrac16,\tfrac13,\tfrac12)$ and $g_p=(1,-2,3)$: mean 1, $g_s=(0,-1,1)$. Attention with these scores as a bias,
# and values equal to $g_p$:

# %%
p, g = np.array([1 / 6, 1 / 3, 1 / 2]), np.array([1.0, -2.0, 3.0])
nothing = jnp.zeros((1, 3, 1, 1))


def attend(bias):
    """Output of one query over three keys; its gradient with respect to the probabilities is g."""
    values = jnp.asarray(g, jnp.float32)[None, :, None, None]
    return dot_product_attention(nothing[:, :1], nothing, values, bias[None, None, None, :])[0, 0, 0, 0]


scores = jnp.log(jnp.asarray(p, jnp.float32))
mean, g_s = attend(scores), jax.grad(attend)(scores)
jacobian = jax.jacrev(jax.nn.softmax)(scores)
wrong_g_s = p * g
print(f"mean {mean:.3f}, gradient sums to 0; without the subtracted mean it sums to {wrong_g_s.sum():.3f}")
assert np.isclose(mean, 1)
assert np.allclose(g_s, [0, -1, 1], atol=1e-6)
assert np.allclose(jacobian, np.diag(p) - np.outer(p, p), atol=1e-6)
assert not np.isclose(wrong_g_s.sum(), 0)

# %% [markdown]
# ## Exercise 33.5: the limit of one part
#
# *An operator takes 20% of the time and becomes 10 times faster. What can the whole gain?*
#
# Eq. 33.1: $1/(0.8+0.02)=\tfrac{50}{41}$, and at most $1/0.8=\tfrac54$ however fast it becomes.

# %%
gain, limit = amdahl_speedup(Fraction(1, 5), 10), amdahl_speedup(Fraction(1, 5), math.inf)
wrong_gain = Fraction(1, 5) * 10 + Fraction(4, 5)
print(f"{gain} = {float(gain):.4f}, at most {limit}; the mean of the speed-ups, {float(wrong_gain)}, is none")
assert gain == Fraction(50, 41)
assert limit == Fraction(5, 4)
assert wrong_gain > limit

# %% [markdown]
# ## Exercise 33.6: which buckets to compile
#
# *Compilation takes 2, 10 and 1 s, calls are 1000, 100 and 20, each saves 3, 50 and 10 ms. Which pay?*
#
# Eq. 33.9 for each: $n\,\Delta t-C$ is $3-2=1$, $5-10=-5$ and $0.2-1=-0.8$ seconds: the first alone. Cache hits,
# memory and the deadline of a first request come on top and may turn the answer: `should_precompile` weighs them and
# says why.

# %%
buckets = [(2, 1000, Fraction(3, 1000)), (10, 100, Fraction(50, 1000)), (1, 20, Fraction(10, 1000))]
nets = [net_benefit(C, n, saved, 0) for C, n, saved in buckets]
paying = [pays_off(C, n, saved, 0) for C, n, saved in buckets]
print("net seconds:", ", ".join(str(net) for net in nets))
assert nets == [1, -5, Fraction(-4, 5)]
assert paying == [True, False, False]
wrong_paying = [n * saved > 0 for _, n, saved in buckets]  # "a faster call is a gain"
assert wrong_paying != paying

in_the_cache = should_precompile(10, 100, Fraction(50, 1000), 0, cached_load_time=Fraction(1, 2))
too_large = should_precompile(2, 1000, Fraction(3, 1000), 0, memory_bytes=2**31, free_bytes=2**30)
print("second bucket, found in the cache:", *in_the_cache.reasons)
print("first bucket, 2 GiB where 1 GiB is free:", *too_large.reasons)
assert in_the_cache
assert not too_large

# %% [markdown]
# ## Exercise 33.7: acceptance, residual, law
#
# *$p=(0.1,0.6,0.3)$, $q=(0.5,0.2,0.3)$: acceptance, residual, and the law of the output.*
#
# $a=(\tfrac15,1,1)$ by eq. 33.10; accepted masses $(0.1,0.2,0.3)$, $A=0.6$; positive differences $(0,0.4,0)$, so a
# rejection always gives the second token; together $p$.

# %%
p, q = np.array([0.1, 0.6, 0.3]), np.array([0.5, 0.2, 0.3])
assert np.allclose(acceptance_probability(p, q), [1 / 5, 1, 1])
assert np.isclose(acceptance_rate(p, q), 3 / 5)
assert np.allclose(residual_distribution(p, q), [0, 1, 0])
assert np.allclose(output_law(p, q), p)
wrong_redraw = np.minimum(p, q) + (1 - 3 / 5) * p
print(f"redraw from p after a rejection: {np.round(wrong_redraw, 4)} instead of {p}")
assert np.allclose(wrong_redraw, [7 / 50, 11 / 25, 21 / 50])

# %% [markdown]
# ## Exercise 33.8 (optional): total variation, other supports
#
# *Show that $A$ is one less the total variation distance; discuss different supports.*
#
# $\min(a,b)=\tfrac12(a+b-|a-b|)$, summed over tokens: $\sum\min(p,q)=1-\tfrac12\|p-q\|_1$. A token with $q=0<p$ is
# never drafted and comes from the residual; one with $p=0<q$ is drafted and always rejected. Exactness needs no common
# support:

# %%
rng = np.random.default_rng(0)
P, Q = (rng.dirichlet(np.full(6, 0.3), size=1000) for _ in range(2))
P[:, 0], Q[:, 1] = 0, 0
P, Q = P / P.sum(1, keepdims=True), Q / Q.sum(1, keepdims=True)
assert np.allclose(acceptance_rate(P, Q), 1 - np.abs(P - Q).sum(1) / 2, atol=1e-6)
assert np.allclose(output_law(P, Q), P, atol=1e-6)
wrong_rate = (P * Q).sum(1)  # the acceptance of matching the target's own sample
assert not np.allclose(acceptance_rate(P, Q), wrong_rate, atol=1e-2)

one, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
assert acceptance_rate(one, other) == 0
assert np.array_equal(output_law(one, other), one)
assert acceptance_rate(one, one) == 1
assert np.array_equal(output_law(one, one), one)

# %% [markdown]
# ## Exercise 33.9: two temperatures
#
# *Why may draft and target use different temperatures, and why must the probabilities be those actually used?*
#
# Nothing in eq. 33.13 relates $q$ to $p$; it only needs $x\sim q$. Logits $(\log4,0)$: the target at 1 has
# $p=(\tfrac45,\tfrac15)$, the draft at 2 has $q=(\tfrac23,\tfrac13)$, $a=(1,\tfrac35)$, $A=\tfrac{13}{15}$. If the
# draft's sample is scored as if it had been drawn at temperature 1, every draft is accepted, and the output has the
# law $q$.

# %%
logits = jnp.log(jnp.array([[4.0, 1.0]]))
p, q = (np.asarray(probabilities(logits, SamplingParams(temperature=t))[0][0], np.float64) for t in (1.0, 2.0))
assert np.allclose(p, [4 / 5, 1 / 5])
assert np.allclose(q, [2 / 3, 1 / 3])
assert np.allclose(acceptance_probability(p, q), [1, 3 / 5])
assert np.isclose(acceptance_rate(p, q), 13 / 15)
assert np.allclose(output_law(p, q), p)
scored_as = p  # what the rule is told instead of q
accept = np.asarray(acceptance_probability(p, scored_as))
wrong_law = q * accept + (1 - (q * accept).sum()) * np.asarray(residual_distribution(p, scored_as))
print(f"scored at temperature 1: law {np.round(wrong_law, 4)} instead of {np.round(p, 4)}")
assert np.allclose(wrong_law, [2 / 3, 1 / 3])

# %% [markdown]
# ## Exercise 33.10: acceptance by position
#
# *Conditional acceptances 0.9, 0.7, 0.5: expected tokens a round.*
#
# $1+0.9+0.9\cdot0.7+0.9\cdot0.7\cdot0.5=2.845=\tfrac{569}{200}$, where each rate is given that the drafts before were
# accepted. A length limit or a stop token cuts terms off. (The printed answer writes $\mathbb{E}K$ for $\mathbb{E}N$.)

# %%
rates = [Fraction(9, 10), Fraction(7, 10), Fraction(1, 2)]
N = expected_tokens(rates)
cut = [expected_tokens(rates, remaining=left) for left in (1, 2, 3)]
wrong_N = expected_tokens(sum(rates) / 3, 3)
print(
    f"E[N] = {N} = {float(N)}; with 1, 2, 3 tokens left {[float(x) for x in cut]}; mean in powers {float(wrong_N):.3f}"
)
assert Fraction(569, 200) == N
assert cut == [1, Fraction(19, 10), Fraction(253, 100)]
assert abs(float(wrong_N) - 2.533) < 1e-3

# %% [markdown]
# ## Exercise 33.11: lengths after a rejection
#
# *The second draft is rejected. What becomes of both caches, the emitted length, and the token not yet in a cache?*
#
# Row of length $L$, caches $L-1$ (the last token is pending). Both models read the pending token and $D$ drafts:
# caches $L+D$. The first draft and a correction are emitted: length $L+2$. Both caches go back to $L+1$, which drops
# the second draft and all after it. The correction is pending. If all are accepted: length $L+D+1$, caches $L+D$, the
# bonus pending.
#
# A model that writes down how far its cache once reached, drafts with a certain law, and coins chosen by hand:


# %%
class Counted(NamedTuple):
    """A cache that holds no keys, only how many positions there are, and how many there once were."""

    length: jax.Array  # [B]
    reached: jax.Array  # [B]


def init_cache(batch, capacity):
    """An empty cache."""
    return Counted(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))


def apply(law, tokens, cache):
    """The same law everywhere; T more positions."""
    length = cache.length + tokens.shape[1]
    return jnp.broadcast_to(law, (*tokens.shape, 2)), Counted(length, jnp.maximum(cache.reached, length))


def one_round(coins, rolls_back=rollback):
    """A round with D = 3 at L = 5: the target says 0 or 1 with probability 1/2, the draft always 0."""
    model = LanguageModel(apply, init_cache, 2, rollback=rolls_back)
    state = init_state(
        jax.random.key(0),
        model,
        jnp.log(jnp.array([0.5, 0.5])),
        jnp.zeros((1, 5), jnp.int32),
        jnp.array([5]),
        drafter=ModelDrafter(model, jnp.array([0.0, -jnp.inf])),
        draft_length=3,
        max_new_tokens=9,
    )
    assert state.target_cache.length == 4
    draws = Draws(jnp.zeros((1, 3)), jnp.array([coins], jnp.float32), jnp.zeros(1))
    return round_step(state, draws=draws)


L, D = 5, 3
for name, coins, emitted in (("second rejected", [0.1, 0.9, 0.1], 2), ("all accepted", [0.1, 0.1, 0.1], D + 1)):
    after, info = one_round(coins)
    caches = (after.target_cache, after.draft_cache)
    print(
        f"{name}: length {L} -> {int(after.lengths[0])}, caches {L - 1} -> "
        f"{int(caches[0].reached[0])} -> {[int(cache.length[0]) for cache in caches]}"
    )
    assert after.lengths == L + emitted
    assert all(cache.reached == L + D for cache in caches)
    assert all(cache.length == L + emitted - 1 for cache in caches)
wrong_state, _ = one_round([0.1, 0.9, 0.1], rolls_back=lambda cache, length: cache)
wrong_length = int(wrong_state.target_cache.length[0])
print(f"without a rollback the caches would still hold {wrong_length} positions, two of them of rejected drafts")
assert wrong_length == L + D != L + 1

# %% [markdown]
# ## Exercise 33.12 (optional): the window bound
#
# *Derive the bound of eq. 33.16, and say why it promises nothing about a task.*
#
# With $a$ the mean over kept values and $b$ over dropped ones, $o=(1-\delta)a+\delta b$ and $o'=a$, so
# $\|o-o'\|=\delta\|b-a\|\le2\delta M$. It is one row of one layer. Further layers, positions and sampling may amplify
# it: two logits that lie closer together than the bound may change places, and with them the whole text after it.

# %%
rng = np.random.default_rng(1)
for _ in range(200):
    masses, values = rng.dirichlet(np.full(8, 0.5)), rng.normal(size=(8, 3))
    kept = np.arange(8) < 5
    if masses[kept].sum() == 0:
        continue
    delta, M = dropped_mass(masses, kept), np.linalg.norm(values, axis=1).max()
    o, o_window = masses @ values, masses[kept] @ values[kept] / masses[kept].sum()
    assert np.linalg.norm(o - o_window) <= window_error_bound(min(delta, 1 - 1e-12), M) + 1e-12

o, o_window = 3 / 4 * 1 + 1 / 4 * -1, 1.0  # tight: 1 kept, -1 dropped
wrong_bound = Fraction(1, 4) * 1  # delta M
print(f"tight case: error {abs(o - o_window)}, bound {window_error_bound(Fraction(1, 4), 1)}, delta M {wrong_bound}")
assert abs(o - o_window) == window_error_bound(Fraction(1, 4), 1) == Fraction(1, 2)
assert abs(o - o_window) > wrong_bound

full_logits, window_logits = np.array([1.0, 0.9]), np.array([0.9, 1.0])  # an error of 0.1 in each
wrong_promise = full_logits.argmax() == window_logits.argmax()  # "a small error keeps the text"
assert not wrong_promise

# %% [markdown]
# ## Exercise 33.13: cost a token
#
# *A: 12 ms a round, 3 tokens on average; B: higher acceptance, 20 ms, 4 tokens. Which one, and what about high
# concurrency?*
#
# Long-run cost is total time over total tokens: $12/3=4$ ms against $20/4=5$ ms, so A, although B accepts more.
# Averages are taken of sums, never of the rounds' own ratios. Under load the answer may change: with the same quality
# and sampling protocol one has to measure again over batch composition, ragged lengths, queueing, utilisation and tail
# latency, since draft and verification then compete for the same device.

# %%
cost_a, cost_b = time_per_token([12], [3]), time_per_token([20], [4])
wrong_choice = max([("A", 3), ("B", 4)], key=lambda scheme: scheme[1])[0]  # by tokens a round alone
print(f"A: {cost_a} ms a token, B: {cost_b} ms a token")
assert (cost_a, cost_b) == (4, 5)
assert wrong_choice == "B"

uneven = time_per_token([12, 12], [1, 5])  # A again, with rounds that differ: still 3 tokens a round
wrong_mean = (Fraction(12, 1) + Fraction(12, 5)) / 2
print(f"rounds of 1 and 5 tokens: {uneven} ms; mean of the ratios {float(wrong_mean)} ms, which would choose B")
assert uneven == 4
assert wrong_mean > cost_b
