# %% [markdown]
# # 33.2 The statistics of an online softmax
#
# The output of attention for one query is
#
# $$o=\frac{\sum_j e^{z_j}v_j}{\sum_j e^{z_j}},\qquad z_j=\frac{q^\mathsf{T}k_j}{\sqrt{d_h}}+M_j, \tag{33.2}$$
#
# and this notebook computes it in parts: split the keys in any way, keep three numbers of each part, merge them in any
# order. That is not an approximation. What makes it exact is that the three numbers form a commutative monoid.

# %%
import itertools
import math

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from flashspec import attention_stats, dot_product_attention, finalize, merge, merge_across, merge_axis
from flashspec.online_softmax import SoftmaxStats, empty_stats, stats_of

# %% [markdown]
# ## Local outputs are not enough
#
# Example 25.1 (as printed, section 33.2): scores $(\log 2, \log 1, \log 6)$ with the values $(1, 4, 5)$. The first two
# keys are part $A$, the third is part $B$. `stats_of` gives the statistics of a set of keys and `finalize` the output
# $u/\ell$.

# %%
scores, values = jnp.log(jnp.array([2.0, 1.0, 6.0])), jnp.array([[1.0], [4.0], [5.0]])


def output(stats):
    """u / l of one query with one value component."""
    return float(finalize(stats)[0][0])


A, B = stats_of(scores[:2], values[:2]), stats_of(scores[2:], values[2:])
right = output(stats_of(scores, values))
wrong_sum, wrong_mean = output(A) + output(B), (output(A) + output(B)) / 2
print(f"A alone: {output(A):g}, B alone: {output(B):g}")
print(f"all three keys: {right:g}; sum of the two outputs: {wrong_sum:g}; their mean: {wrong_mean:g}")
assert np.isclose(right, (2 * 1 + 1 * 4 + 6 * 5) / (2 + 1 + 6))
assert not np.isclose(wrong_sum, right)
assert not np.isclose(wrong_mean, right)

# %% [markdown]
# The outputs 2 and 5 have lost how much of the whole denominator is theirs: the masses are $2 + 1 = 3$ and $6$. So the
# mass has to be kept, and it has to be kept in a form that does not overflow.
#
# ## The statistics of a part (eq. 33.3)
#
# $$m_A=\max_{j\in A}z_j,\quad \ell_A=\sum_{j\in A}e^{z_j-m_A},\quad u_A=\sum_{j\in A}e^{z_j-m_A}v_j. \tag{33.3}$$

# %%
for name, part in (("A", A), ("B", B)):
    print(f"{name}: m = log {math.exp(part.m):.0f}, l = {float(part.l):g}, u = {float(part.u[0]):g}")
assert np.allclose([A.m, A.l, A.u[0]], [math.log(2), 3 / 2, 3])
assert np.allclose([B.m, B.l, B.u[0]], [math.log(6), 1, 5])

# %% [markdown]
# Why the maximum is taken out: with scores of a thousand the sum of exponentials is infinite in any floating-point
# format, while the statistics stay what they are.

# %%
large = stats_of(scores + 1000, values)
wrong_output = float((jnp.exp(scores + 1000) @ values)[0] / jnp.exp(scores + 1000).sum())
print(f"scores + 1000: {output(large):.4f}; without the maximum: {wrong_output}")
assert np.isclose(output(large), right, rtol=1e-4)  # 1000.693 has four digits less after the point than 0.693
assert math.isnan(wrong_output)

# %% [markdown]
# ## Merging two parts (eq. 33.4, 33.5)
#
# For disjoint $A, B$ and $m=\max(m_A,m_B)$
#
# $$\ell=e^{m_A-m}\ell_A+e^{m_B-m}\ell_B, \tag{33.4}$$
# $$u=e^{m_A-m}u_A+e^{m_B-m}u_B, \tag{33.5}$$
#
# because $e^{m_A-m}e^{z_j-m_A}=e^{z_j-m}$: each term of the part becomes a term of the whole. Both weights are at most
# 1, so nothing overflows. (Algorithm 33.1 says "by 33.5"; it needs 33.4 as well.)

# %%
both = merge(A, B)
print(f"merged: m = log {math.exp(both.m):.0f}, l = {float(both.l):g}, u = {float(both.u[0]):g}, o = {output(both):g}")
assert np.allclose([both.m, both.l, both.u[0], output(both)], [math.log(6), 3 / 2, 6, 4])

wrong = SoftmaxStats(both.m, A.l + B.l, A.u + B.u, both.nonempty)  # added without bringing both to one maximum
print(f"added without the factors: o = {output(wrong):g}")
assert not np.isclose(output(wrong), 4)

# %% [markdown]
# ## Any order, any bracketing
#
# The union of sets is commutative and associative, and the merge computes the statistics of the union, so it is too,
# in exact arithmetic. In floating point each order rounds in its own way. Twelve keys, each its own part, are merged
# here in 500 random orders: all agree to a few units of the last place, and they do not all agree bit for bit.

# %%
rng = np.random.default_rng(0)
z, v = jnp.asarray(3 * rng.normal(size=12), jnp.float32), jnp.asarray(rng.normal(size=(12, 1)), jnp.float32)
single = stats_of(z[:, None], v[:, None])  # twelve parts of one key each


@jax.jit
def merged_in(order):
    """The output after merging the parts one by one."""
    parts = jax.tree.map(lambda x: x[order], single)
    first, rest = (jax.tree.map(lambda x, s=s: x[s], parts) for s in (0, slice(1, None)))
    return finalize(jax.lax.scan(lambda stats, part: (merge(stats, part), None), first, rest)[0])[0][0]


orders = jnp.asarray([rng.permutation(12) for _ in range(500)], jnp.int32)
outputs = np.asarray(jax.vmap(merged_in)(orders), np.float64)
exact = float(np.exp(np.float64(z)) @ np.float64(v)[:, 0] / np.exp(np.float64(z)).sum())
error = (outputs - exact) / np.spacing(np.float32(abs(exact)))
figure, axes = plt.subplots(figsize=(6, 3))
axes.hist(error, bins=25)
axes.set(xlabel="error, units of the last place of float32", ylabel="orders", title="500 orders of merging")
assert np.abs(error).max() < 8
wrong_claim = len(np.unique(outputs)) == 1  # "exact" does not mean bit for bit in every order
assert not wrong_claim

# %% [markdown]
# All 3! orders and both bracketings of example 25.1 as three parts, as exercise 33.1 asks:

# %%
parts = [stats_of(scores[i : i + 1], values[i : i + 1]) for i in range(3)]
for a, b, c in itertools.permutations(parts):
    for stats in (merge(merge(a, b), c), merge(a, merge(b, c))):
        assert np.allclose([stats.m, stats.l, stats.u[0]], [math.log(6), 3 / 2, 6])

# %% [markdown]
# The monoid makes three programs possible that all mean the same: a scan over blocks in one core (algorithm 33.1), a
# fold over an axis of parts (`merge_axis`, what splitting the keys over many cores needs), and a merge over a mesh of
# devices (`merge_across`).

# %%
by_axis = output(merge_axis(single, 0))
by_devices = jax.vmap(lambda part: merge_across(part, "devices"), axis_name="devices")(single)
every_device = np.asarray(jax.vmap(lambda stats: finalize(stats)[0][0])(by_devices))
print(f"fold over an axis: {by_axis:.5f}, across devices: {every_device[0]:.5f}, in one piece: {exact:.5f}")
assert np.allclose([by_axis, *every_device], exact, rtol=1e-5)
wrong_mean = float(np.mean(v))  # every part alone has its own value as output: the mean of outputs
assert not np.isclose(wrong_mean, exact, rtol=1e-2)

# %% [markdown]
# ## Parts must be disjoint
#
# A merge of overlapping parts counts the common keys twice, and nothing in the result shows it.

# %%
first_and_last = jnp.array([0, 2])
wrong_overlap = output(
    merge(stats_of(scores[:2], values[:2]), stats_of(scores[first_and_last], values[first_and_last]))
)
disjoint = output(merge(stats_of(scores[:2], values[:2]), stats_of(scores[2:], values[2:])))
print(f"disjoint: {disjoint:g}; the first key in both parts: {wrong_overlap:g}")
assert np.isclose(disjoint, 4)
assert not np.isclose(wrong_overlap, 4)

# %% [markdown]
# ## Empty parts and empty rows
#
# A part whose keys are all hidden contributes nothing: it is the neutral element, $(-\infty, 0, 0)$ with a flag that
# says "empty". Without the flag one would compute $-\infty-(-\infty)$.

# %%
nothing = stats_of(scores, values, visible=jnp.zeros(3, bool))
for merged in (merge(both, nothing), merge(nothing, both), merge(both, empty_stats((), 1))):
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(merged), jax.tree.leaves(both), strict=True))
assert not merge(nothing, nothing).nonempty

wrong_scale = jnp.exp(nothing.m - jnp.maximum(nothing.m, nothing.m))
print(f"empty part: m = {nothing.m}, l = {nothing.l:g}; e^(m - m) would be {wrong_scale}")
assert jnp.isnan(wrong_scale)

# %% [markdown]
# A *row* is empty when all of its parts are. Then eq. 33.2 has a zero denominator, and an interface has to say what
# happens. Here the output is exactly 0, the log-normaliser is $-\infty$ and gradients are 0; or, if asked, an error.

# %%
query = jnp.ones((1, 2, 1, 4))
key = value = jnp.ones((1, 3, 1, 4))
lengths = jnp.array([0])  # no key of the only row counts
out, lse = dot_product_attention(query, key, value, kv_lengths=lengths, return_lse=True)
gradient = jax.grad(lambda k: dot_product_attention(query, k, value, kv_lengths=lengths).sum())(key)
assert not out.any()
assert not gradient.any()
assert (lse == -jnp.inf).all()
wrong_row = jax.nn.softmax(jnp.full(3, -jnp.inf))  # an ordinary softmax of nothing
assert jnp.isnan(wrong_row).all()

try:
    dot_product_attention(query, key, value, kv_lengths=lengths, empty_rows="error")
    wrong_silence = True
except ValueError as error:
    wrong_silence = False
    print(error)
assert not wrong_silence

# %% [markdown]
# ## The same with whole attention calls
#
# `attention_stats` is attention that stops before the division: `(m, l, u)` of every query over one part of the keys.
# Two halves of the keys, merged and finalised, are attention over all of them. `cascade_attention` is made of this: a
# prefix that many rows share is one part, read once, and each row's own cache the other
# (`notebooks/examples/shared_prefix.py`).

# %%
keys = jax.random.split(jax.random.key(0), 3)
query, key, value = (jax.random.normal(k, (2, 5, 4, 8)) for k in keys)
halves = [attention_stats(query, key[:, s], value[:, s]) for s in (slice(0, 2), slice(2, 5))]
whole = dot_product_attention(query, key, value, implementation="reference")
joined, _ = finalize(merge(*halves))
wrong_average = sum(finalize(half)[0] for half in halves) / 2
print(f"the average of the two outputs is up to {abs(wrong_average - whole).max():.1f} off")
assert np.allclose(joined, whole, atol=1e-5)
assert not np.allclose(wrong_average, whole, atol=1e-1)
