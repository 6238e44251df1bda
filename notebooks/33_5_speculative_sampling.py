# %% [markdown]
# # 33.5 Speculative sampling at one prefix
#
# A draft law $q$ proposes, a target law $p$ decides, and what comes out is distributed as $p$: not nearly, exactly.
# This notebook derives it (eq. 33.10 to 33.13), computes the law of the output by enumeration instead of sampling, and
# puts the usual mistakes beside it.
#
# What is *not* tested anywhere here is whether two texts sampled under one seed are equal. Another rule, batch or
# padded shape uses its random numbers in another way, and the texts then differ although both follow $p$. The law is
# the test.

# %%
import ipywidgets
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from flashspec import (
    SamplingParams,
    acceptance_probability,
    acceptance_rate,
    output_law,
    probabilities,
    residual_distribution,
    verify_chain,
    verify_greedy,
    verify_match,
)
from flashspec.costs import expected_acceptance

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## Acceptance (eq. 33.10, 33.11)
#
# The draft $x\sim q$ is kept with probability
#
# $$a(x)=\min\{1,\tfrac{p(x)}{q(x)}\}, \tag{33.10}$$
#
# so that $x$ is drafted and kept with mass $q(x)a(x)=\min(p(x),q(x))$, and something is kept with probability
#
# $$A=\sum_x\min(p(x),q(x))=1-\tfrac12\sum_x|p(x)-q(x)|, \tag{33.11}$$
#
# one less the total variation distance. Example 25.2 (section 33.5):

# %%
p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
a, A = acceptance_probability(p, q), acceptance_rate(p, q)
print(f"a = {np.asarray(a)}, A = {A:.3f}")
assert np.allclose(a, [1, 3 / 5, 2 / 3])
assert np.isclose(A, 7 / 10)
assert np.isclose(A, 1 - np.abs(p - q).sum() / 2)
wrong_A = np.mean(a)  # the mean of a over tokens, not over drafts
assert not np.isclose(wrong_A, A, atol=1e-2)

# %% [markdown]
# The picture of the masses: of what $q$ proposes, the part below both is kept (blue), the rest of $q$ is rejected
# (grey), and what is then missing of $p$ (orange) has the same total, because both sum to 1.


# %%
def draw(first=0.2):
    """Masses for the target of example 25.2 and a draft whose first token has the mass `first`."""
    draft = np.array([first, (1 - first) * 5 / 8, (1 - first) * 3 / 8])
    kept = np.minimum(p, draft)
    _, axes = plt.subplots(figsize=(6.5, 3.2))
    at = np.arange(3)
    axes.bar(at - 0.2, kept, 0.4, color="C0", label="min(p, q): drafted and kept")
    axes.bar(at - 0.2, draft - kept, 0.4, bottom=kept, color="lightgray", label="rest of q: rejected")
    axes.bar(at + 0.2, kept, 0.4, color="C0")
    axes.bar(at + 0.2, p - kept, 0.4, bottom=kept, color="C1", label="rest of p: the residual")
    axes.set(xticks=at, xticklabels=["token 0", "token 1", "token 2"], ylim=(0, 1))
    axes.set_title(f"left q, right p; A = {float(acceptance_rate(p, draft)):.3f}")
    axes.legend()


draw()

# %% [markdown]
# With a running kernel:

# %%
ipywidgets.interact(draw, first=(0.0, 1.0, 0.05))
# %% [markdown]
# The acceptance rate over all drafts on three tokens, for the target of the example. It is 1 at $q=p$ alone, and falls
# linearly away from it: a hill with flat sides, not a bell.

# %%
n = 60
grid = np.array([(i, j, n - i - j) for i in range(n + 1) for j in range(n + 1 - i)]) / n
surface = np.asarray(acceptance_rate(np.broadcast_to(p, grid.shape), grid))
figure, axes = plt.subplots(figsize=(6, 4.2))
shown = axes.tricontourf(grid[:, 1] + grid[:, 2] / 2, grid[:, 2], surface, levels=np.linspace(0, 1, 11))
for law, name in ((p, "p"), (q, "q")):
    axes.plot(law[1] + law[2] / 2, law[2], "wo")
    axes.annotate(name, (law[1] + law[2] / 2, law[2]), color="w", xytext=(6, 6), textcoords="offset points")
for corner, place in enumerate([(0, -0.05), (1, -0.05), (0.5, 1.02)]):
    axes.annotate(f"token {corner} certain", place, ha="center", fontsize="small")
axes.set(title="A over all q", xlim=(-0.15, 1.15), ylim=(-0.1, 1.1))
axes.axis("off")
figure.colorbar(shown)
nearest = np.abs(grid - p).sum(1).argmin()
assert surface.argmax() == nearest
wrong_surface = grid @ p  # sum of p q, the acceptance of matching instead: largest where q sits on p's maximum
assert wrong_surface.argmax() != nearest

# %% [markdown]
# ## The residual (eq. 33.12) and the law of the output (eq. 33.13)
#
# At a rejection (probability $Z=1-A$) the token is drawn from
#
# $$r(x)=\frac{[p(x)-q(x)]_+}{Z}, \tag{33.12}$$
#
# whose numerators sum to $Z$ since $p$ and $q$ have the same total. Both ways of getting $x$ together:
#
# $$\Pr(\text{output}=x)=\min(p(x),q(x))+Z\,r(x)=p(x). \tag{33.13}$$

# %%
r, law = residual_distribution(p, q), output_law(p, q)
print(f"r = {np.asarray(r)}, law of the output = {np.asarray(law)}")
assert np.allclose(r, [1, 0, 0])
assert np.allclose(law, p)
wrong_redraw = np.minimum(p, q) + (1 - A) * p  # after a rejection simply sample p again
wrong_mass = q * np.minimum(1, q / p)  # the ratio of eq. 33.10 upside down
wrong_ratio = wrong_mass + (1 - wrong_mass.sum()) * np.asarray(r)
print(f"redraw from p: {wrong_redraw}")
assert np.allclose(wrong_redraw, [7 / 20, 39 / 100, 13 / 50])
assert np.allclose(wrong_ratio, q)

# %% [markdown]
# A high acceptance does not make up for a wrong rejection branch. The redraw is wrong by $Z\,(p - r)$, and it looks
# plausible: it is a distribution, with the right support, near $p$.
#
# ## The rule itself, by enumeration
#
# `verify_chain` accepts iff $u\,q(x)<p(x)$, with $u$ uniform in $[0,1)$, and draws the final token by inverting a
# cumulative sum with a second uniform. Given a grid of uniforms at the middles of equal cells, whose borders include
# every threshold, averaging over the grid *is* the integral over $[0,1)^2$. No sampling error is left; what remains is
# rounding.


# %%
def cells(n):
    """The middles of n equal cells of [0, 1)."""
    return (np.arange(n) + 0.5) / n


def law_of(verify, p, q, n):
    """Exact law of the first token that comes out: drafts by weight q, coins and final draws on a grid."""
    vocab = len(p)
    draft, coin, final = (x.ravel() for x in np.meshgrid(np.arange(vocab), cells(n), cells(n), indexing="ij"))
    verdict = verify(draft[:, None], coin[:, None], final)
    first = np.where(np.asarray(verdict.num_accepted) > 0, draft, np.asarray(verdict.next_token))
    weight = q[draft.astype(int)] / n**2
    return np.bincount(first.astype(int), weight, minlength=vocab)


def rows(law, batch, length):
    """The same law at every position of every row: [batch, length, V]."""
    return jnp.broadcast_to(jnp.asarray(law, jnp.float32), (batch, length, len(law)))


def chain(p, q):
    """`verify_chain` of one draft token with these laws."""

    def verify(draft, coin, final):
        batch = len(draft)
        tokens = jnp.asarray(draft, jnp.int32)
        return verify_chain(None, tokens, rows(q, batch, 1), rows(p, batch, 2), uniforms=(coin, final))

    return verify


enumerated = law_of(chain(p, q), p, q, 30)
wrong_law = law_of(chain(p, p), p, q, 30)  # the draft's own law is not told: the rule believes that q = p
print(f"the rule: {enumerated}; with a false draft law: {wrong_law}")
assert np.allclose(enumerated, p, atol=1e-6)
assert np.allclose(wrong_law, q, atol=1e-6)  # it accepts everything, and puts out the draft

# %% [markdown]
# The same picture for the example, the right rule beside three wrong ones:

# %%
laws = {"target p": p, "the rule": enumerated, "redraw from p": wrong_redraw, "ratio upside down": wrong_ratio}
laws["false draft law"] = wrong_law
figure, axes = plt.subplots(figsize=(7, 3.4))
for place, (name, values) in enumerate(laws.items()):
    axes.bar(np.arange(3) + 0.16 * (place - 2), values, 0.15, label=name)
axes.set(xticks=range(3), xticklabels=["token 0", "token 1", "token 2"], title="law of the output")
axes.legend(fontsize="small")
# %% [markdown]
# ## By sampling, with a bound
#
# What one can do with a model too large to enumerate: compare frequencies with $p$, at a bound that a right rule meets
# almost surely. By the inequality of Bretagnolle, Huber and Carol, $n$ draws from a law over $V$ tokens are further
# than $\sqrt{(2V\log2+2\log(1/\epsilon))/n}$ from it in $\ell_1$ with probability at most $\epsilon$.

# %%
n = 40_000
draws = np.random.default_rng(0).choice(3, size=n, p=q)
verdict = verify_chain(jax.random.key(0), jnp.asarray(draws[:, None], jnp.int32), rows(q, n, 1), rows(p, n, 2))
out = np.where(np.asarray(verdict.num_accepted) > 0, draws, np.asarray(verdict.next_token))
frequencies = np.bincount(out, minlength=3) / n
bound = np.sqrt((2 * 3 * np.log(2) + 2 * np.log(1e9)) / n)
assert np.abs(frequencies - p).sum() < bound
assert np.abs(wrong_redraw - p).sum() > 4 * bound  # the test can tell

# %% [markdown]
# ## Supports and settings may differ
#
# Where $q(x)=0$ and $p(x)>0$, the token comes from the residual; where $p(x)=0$, the draft is always rejected. With
# disjoint supports nothing is accepted and the law is still $p$; with $q=p$ everything is, and nothing is divided by
# $Z=0$. The draft may use any temperature of its own, as long as the probabilities are those that it was drawn with
# (exercise 33.9).

# %%
disjoint_p, disjoint_q = np.array([0.25, 0.75, 0, 0]), np.array([0, 0, 0.5, 0.5])
assert acceptance_rate(disjoint_p, disjoint_q) == 0
assert np.allclose(law_of(chain(disjoint_p, disjoint_q), disjoint_p, disjoint_q, 4), disjoint_p)
assert np.isclose(acceptance_rate(p, p), 1)
assert np.isfinite(residual_distribution(p, p)).all()

logits = jnp.log(jnp.array([[4.0, 1.0]]))
target, draft = (np.asarray(probabilities(logits, SamplingParams(temperature=t))[0][0]) for t in (1.0, 2.0))
print(f"temperature 1: {target}; temperature 2: {draft}")
exact = law_of(chain(target, draft), target, draft, 60)
wrong_temperature = law_of(chain(target, target), target, draft, 60)  # drafted at 2, scored at 1
assert np.allclose(exact, [4 / 5, 1 / 5], atol=1e-6)
assert np.allclose(wrong_temperature, [2 / 3, 1 / 3], atol=1e-6)

# %% [markdown]
# ## Rounding at $Z=0$
#
# With $p=(0,\tfrac12,\tfrac12)$, $q=(0,\tfrac12+2^{-24},\tfrac12)$ in float32 and $u=1-2^{-23}$, the product $u\,q(x)$
# rounds to $\tfrac12$ and the draft is rejected, while $[p-q]_+$ is zero everywhere. A token with $p>0$ has to come
# out.

# %%
p32 = jnp.array([0, 0.5, 0.5], jnp.float32)
q32 = jnp.array([0, 0.5 + 2**-24, 0.5], jnp.float32)
u = jnp.array([[1 - 2**-23]], jnp.float32)
verdict = verify_chain(None, jnp.array([[1]]), rows(q32, 1, 1), rows(p32, 1, 2), uniforms=(u, jnp.array([0.0])))
token = int(verdict.next_token[0])
wrong_residual = jnp.maximum(p32 - q32, 0) / jnp.maximum(p32 - q32, 0).sum()
print(f"accepted: {int(verdict.num_accepted[0])}, then token {token}; the plain residual is {wrong_residual}")
assert p32[token] > 0
assert jnp.isnan(wrong_residual).all()

# %% [markdown]
# ## Three exact rules
#
# *Chain* is the rule above. *Match* samples the target's own token and keeps drafts while they equal it: exact for any
# drafts, with acceptance $\sum_x p(x)q(x)$. *Greedy* compares with the target's maximum; it reproduces the greedy
# path, which is another thing than sampling (footnote 1 of the chapter).

# %%
rates = {rule: float(expected_acceptance(rule, p, q)) for rule in ("chain", "match", "greedy")}
print({rule: round(rate, 3) for rule, rate in rates.items()})
assert rates["match"] <= rates["chain"]


def match(draft, coin, final):
    """`verify_match`: both uniforms are the target's own draws."""
    own = np.concatenate([coin, final[:, None]], axis=1)
    return verify_match(None, jnp.asarray(draft, jnp.int32), rows(p, len(draft), 2), uniforms=own)


def greedy(draft, coin, final):
    """`verify_greedy`, which uses no uniforms."""
    return verify_greedy(jnp.asarray(draft, jnp.int32), rows(p, len(draft), 2))


assert np.allclose(law_of(match, p, q, 30), p, atol=1e-6)
wrong_greedy = law_of(greedy, p, q, 30)
print(f"greedy matching put to sampling: {wrong_greedy}")
assert np.allclose(wrong_greedy, [1, 0, 0])
