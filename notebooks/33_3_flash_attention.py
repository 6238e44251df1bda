# %% [markdown]
# # 33.3 FlashAttention: the same operator, other data movement
#
# Blockwise attention does the arithmetic of attention. What it saves is the traffic of a $T\times S$ matrix between
# the chip and its memory. This notebook counts that traffic, looks at which tiles a mask lets one skip, derives the
# backward (eq. 33.6 to 33.8) and checks it three ways, and shows the interface errors that give finite, wrong numbers.

# %%
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import experiments
from flashspec import Contiguous, attention_stats, dot_product_attention, finalize, merge, plan_attention
from flashspec.masks import make_mask
from flashspec.records import read_records

RESULTS = Path(experiments.__file__).parent / "results"
MIB = 2**20

# %% [markdown]
# ## The matrix that is never written
#
# An explicit implementation writes the scores, reads them for the softmax, writes the probabilities and reads them for
# the product with the values. At $T = S = 8192$ one head has 67,108,864 scores: 128 MiB at 2 bytes each, 4 GiB for 32
# heads, and that four times over. `plan_attention` says what has to move in any case: the operands once, the result
# once.


# %%
def plan(T, implementation="blockwise"):
    """Causal attention of one layer, 32 heads, bfloat16."""
    operand = jax.ShapeDtypeStruct((1, T, 32, 128), jnp.bfloat16)
    return plan_attention(operand, operand, operand, is_causal=True, implementation=implementation).forward


scores = 8192 * 8192
matrix = 32 * scores * 2
operands = plan(8192).bytes
explicit = operands + 4 * matrix
print(f"scores of one head: {scores:,}; {scores * 2 // MIB} MiB; 32 heads: {matrix // MIB} MiB")
print(f"to move in any case {operands // MIB} MiB, with explicit scores and probabilities {explicit // MIB} MiB")
assert (scores, scores * 2, matrix) == (67_108_864, 128 * MIB, 4 * 1024 * MIB)
assert explicit / operands > 64
wrong_float32 = 32 * scores * 4  # the chapter's figures are for 2 bytes an element
assert wrong_float32 == 8 * 1024 * MIB != matrix

# %% [markdown]
# Memory can be read from the compiled programs. `python -m experiments blockwise_memory` did so up to $8192^2$, and
# its kept records say: the explicit twin grows with $T S$, blockwise attention with $T + S$, in both directions.

# %%
records = read_records(RESULTS / "blockwise_memory" / "records.jsonl")
lines = {}
for record in records:
    settings = record.settings
    if settings["N"] == 32:
        line = lines.setdefault((settings["implementation"], record.name), {})
        line[settings["T"]] = record.values["temporary_bytes"]
figure, axes = plt.subplots(figsize=(7, 4))
for (implementation, direction), sizes in sorted(lines.items()):
    axes.loglog(list(sizes), np.array(list(sizes.values())) / MIB, "o-", label=f"{implementation}, {direction}")
lengths = sorted(lines["blockwise", "forward"])
axes.loglog(lengths, [32 * n * n * 2 / MIB for n in lengths], "k:", label="32 T x S matrices")
axes.set(xlabel="T = S", ylabel="MiB beside the operands", title="32 heads of size 128, bfloat16, compiled for a CPU")
axes.set_xticks(lengths, [str(n) for n in lengths])
axes.minorticks_off()
axes.legend()


def growth(implementation, direction):
    """How many times more memory the last doubling of the length takes."""
    *_, before, last = (size for _, size in sorted(lines[implementation, direction].items()))
    return last / before


for direction in ("forward", "backward"):
    assert growth("blockwise", direction) < 2.2
    wrong_growth = growth("reference", direction)
    assert wrong_growth > 3.5

# %% [markdown]
# ## Algorithm 33.1, written out
#
# One tile of keys after the other: statistics of the tile, merge, and at the end one division. The result does not
# depend on the size of the tiles, because the merge does not (section 33.2). Nothing larger than a tile is ever there.

# %%
keys = jax.random.split(jax.random.key(0), 4)
query, key, value = (jax.random.normal(k, (1, 48, 2, 16)) for k in keys[:3])
whole = dot_product_attention(query, key, value, is_causal=True, implementation="reference")


def in_tiles(size, positions=True):
    """Algorithm 33.1 with tiles of `size` keys."""
    stats = None
    for start in range(0, 48, size):
        tile = slice(start, min(start + size, 48))
        where = {"q_positions": jnp.arange(48), "kv_positions": jnp.arange(48)[tile]} if positions else {}
        part = attention_stats(query, key[:, tile], value[:, tile], is_causal=positions, **where)
        stats = part if stats is None else merge(stats, part)
    return finalize(stats)[0]


for size in (5, 16, 48):
    assert np.allclose(in_tiles(size), whole, atol=1e-5), size
wrong_mask = in_tiles(16, positions=False)  # a tile that does not know where its keys are cannot be causal
assert not np.allclose(wrong_mask, whole, atol=1e-1)

# %% [markdown]
# ## What a mask lets one skip
#
# A mask is kept as structure and asked for one tile at a time: `mask.tile(query, size, key, size)`. A tile without a
# visible pair is skipped, which changes no result. Light: visible; dark: skipped tiles; grey: hidden inside of a tile
# that is visited.

# %%
T, TILE = 64, 8
segments = jnp.asarray(np.repeat([0, 1, 2], [20, 28, 16]), jnp.int32)[None]
masks = {
    "causal": make_mask((1, 1, T, T), is_causal=True),
    "causal, window 12 to the left": make_mask((1, 1, T, T), is_causal=True, window=(12, None)),
    "causal, three packed segments": make_mask(
        (1, 1, T, T), is_causal=True, q_segment_ids=segments, kv_segment_ids=segments
    ),
    "40 of 64 keys are real": make_mask((1, 1, T, T), kv_lengths=jnp.array([40])),
}


def visited(mask):
    """Which tiles hold a visible pair, [T / TILE, T / TILE]."""
    starts = range(0, T, TILE)
    return np.array([[bool(mask.tile(q, TILE, k, TILE).any()) for k in starts] for q in starts])


figure, all_axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
for axes, (name, mask) in zip(all_axes, masks.items(), strict=True):
    pairs, tiles = np.asarray(mask.full())[0, 0], visited(mask)
    axes.imshow(np.where(pairs, 2, np.kron(tiles, np.ones((TILE, TILE), bool))), cmap="cividis", vmin=0, vmax=2)
    axes.set(title=f"{name}\n{tiles.sum()} of {tiles.size} tiles visited", xlabel="key", ylabel="query")
    assert pairs[~np.kron(tiles, np.ones((TILE, TILE), bool))].sum() == 0  # nothing visible is ever skipped

tiles = (T // TILE) ** 2
assert visited(masks["causal"]).sum() == (T // TILE) * (T // TILE + 1) // 2
wrong_diagonal = (T // TILE) * (T // TILE - 1) // 2  # without the tiles on the diagonal, which are half visible
assert wrong_diagonal != visited(masks["causal"]).sum()

# %% [markdown]
# Skipping halves the work of a causal mask. It does not change its order: twice the length is still four times the
# work.

# %%
flops = {n: plan(n).flops for n in (2048, 4096)}
ratio, wrong_linear = flops[4096] / flops[2048], 2
print(f"from 2048 to 4096: {ratio:.3f} times the operations")
assert abs(ratio - 4) < 0.01
assert ratio > wrong_linear

# %% [markdown]
# ## The backward (eq. 33.6 to 33.8)
#
# Let $S=QK^\mathsf{T}/\sqrt{d_h}$, $P=\operatorname{softmax}(S)$ by rows, $O=PV$, and let $G_X$ be the gradient of a
# loss with respect to $X$. From $dO=dP\,V+P\,dV$
#
# $$G_V=P^\mathsf{T}G_O,\qquad G_P=G_OV^\mathsf{T}. \tag{33.6}$$
#
# One row of the softmax has the Jacobian $\operatorname{diag}(p)-pp^\mathsf{T}$, which is symmetric, so
#
# $$(G_S)_{ij}=P_{ij}\Big[(G_P)_{ij}-\sum_kP_{ik}(G_P)_{ik}\Big], \tag{33.7}$$
#
# and $dS=(dQ\,K^\mathsf{T}+Q\,dK^\mathsf{T})/\sqrt{d_h}$ gives
#
# $$G_Q=\frac{G_SK}{\sqrt{d_h}},\qquad G_K=\frac{G_S^\mathsf{T}Q}{\sqrt{d_h}}. \tag{33.8}$$
#
# The subtracted sum is $\langle g_o,o\rangle$ of the row, since $\sum_kP_{ik}\,g_o^\mathsf{T}v_k=g_o^\mathsf{T}o$. So
# the backward needs one number a row besides the normaliser, and can recompute $P$ tile by tile: no $T\times S$ matrix
# here either. Below the formulas as they stand, in float64, against three other ways to the same gradients: the
# blockwise backward, JAX differentiating the explicit twin, and finite differences.

# %%
jax.config.update("jax_enable_x64", True)  # for this section: differences of float64 outputs have 8 good digits
rng = np.random.default_rng(1)
Q, K, V, G_O = (rng.normal(size=(6, 4)) for _ in range(4))


def attention(Q, K, V, implementation):
    """One head; [T, H] in and out."""
    Q, K, V = (x[None, :, None, :] for x in (Q, K, V))
    return dot_product_attention(Q, K, V, implementation=implementation)[0, :, 0]


def loss(Q, K, V, implementation="reference"):
    """Its gradient with respect to the output is G_O."""
    return (attention(Q, K, V, implementation) * G_O).sum()


def chapter(row_term=1.0):
    """(G_Q, G_K, G_V) by eq. 33.6 to 33.8; row_term scales the subtracted sum."""
    P = jax.nn.softmax(Q @ K.T / 2, axis=1)  # 2 = sqrt(4)
    G_V, G_P = P.T @ G_O, G_O @ V.T
    G_S = P * (G_P - row_term * (P * G_P).sum(1, keepdims=True))
    return G_S @ K / 2, G_S.T @ Q / 2, G_V


def finite_difference(which, step=1e-6):
    """Central differences of the loss, entry by entry."""
    arrays = [Q, K, V]
    gradient = np.zeros_like(arrays[which])
    evaluate = jax.jit(loss)
    for index in np.ndindex(*gradient.shape):
        shift = np.zeros_like(gradient)
        shift[index] = step
        up, down = (evaluate(*(x + s * shift if i == which else x for i, x in enumerate(arrays))) for s in (1, -1))
        gradient[index] = (up - down) / (2 * step)
    return gradient


formulas, wrong_formulas = chapter(), chapter(row_term=0.0)
for which, name in enumerate("QKV"):
    numeric = finite_difference(which)
    by_jax, blockwise = (jax.grad(loss, argnums=which)(Q, K, V, i) for i in ("reference", "blockwise"))
    assert np.allclose(formulas[which], by_jax, atol=1e-12)
    assert np.allclose(formulas[which], blockwise, atol=1e-12)
    assert np.allclose(formulas[which], numeric, atol=1e-8)
    wrong_agrees = np.allclose(wrong_formulas[which], numeric, atol=1e-2)
    print(f"G_{name}: four ways agree; without the subtracted sum {'the same' if wrong_agrees else 'another gradient'}")
    assert wrong_agrees == (name == "V")

# %% [markdown]
# The subtracted sum has a meaning: softmax does not change when all scores of a row move together, so each row of
# $G_S$ sums to zero. A bias on the scores has the gradient $G_S$ itself, which shows it.

# %%
four = [x[None, :, None, :] for x in (Q, K, V)]
G_S = jax.grad(lambda bias: (dot_product_attention(*four, bias)[0, :, 0] * G_O).sum())(jnp.zeros((1, 1, 6, 6)))[0, 0]
P, G_P = jax.nn.softmax(Q @ K.T / 2, axis=1), G_O @ V.T
wrong_G_S = P * G_P
print(f"largest row sum of G_S: below 1e-12; without the subtracted sum {abs(wrong_G_S.sum(1)).max():.2f}")
assert np.allclose(G_S.sum(1), 0, atol=1e-12)
assert np.allclose(G_S, P * (G_P - (P * G_P).sum(1, keepdims=True)), atol=1e-12)
assert not np.allclose(wrong_G_S.sum(1), 0, atol=1e-2)
jax.config.update("jax_enable_x64", False)

# %% [markdown]
# With dropout at rate $r$, $P'=P\cdot\mathrm{keep}/(1-r)$ takes the place of $P$ in $G_V$, and $G_P$ becomes
# $\mathrm{keep}\cdot(G_OV^\mathsf{T})/(1-r)$; the normaliser stays whole. The backward has to draw the *same* mask
# again. Here it depends on the key and on the indices of a pair, not on the order of computation, so that it can.

# %%
dropped = {"dropout_rate": 0.3, "dropout_key": jax.random.key(7)}


def mean_output(value, implementation, **dropout):
    """Linear in the value, so that its gradient is exact."""
    return dot_product_attention(query, key, value, implementation=implementation, **dropout).sum()


same, twin = (jax.grad(mean_output)(value, i, **dropped) for i in ("blockwise", "reference"))
wrong_other_mask = jax.grad(mean_output)(value, "blockwise", dropout_rate=0.3, dropout_key=jax.random.key(8))
forward = mean_output(value, "blockwise", **dropped)
assert np.allclose(same, twin, atol=1e-5)
assert np.isclose((same * value).sum(), forward, rtol=1e-4)  # a linear function is its gradient times its argument
assert not np.isclose((wrong_other_mask * value).sum(), forward, rtol=1e-4)

# %% [markdown]
# ## Errors that stay finite
#
# **Alignment.** In cached decoding the one query is the latest position. Aligned by array index instead (top-left), it
# sees the first key alone, and its output is $v_0$: finite, plausible, wrong. So a causal mask with $T\ne S$ has to
# say where the queries are, or is refused.

# %%
latest = query[:, -1:]
try:
    dot_product_attention(latest, key, value, is_causal=True)
    wrong_guess = True
except ValueError as error:
    wrong_guess = False
    print(error)
assert not wrong_guess

right = dot_product_attention(latest, key, value, is_causal=True, q_positions=Contiguous(jnp.array([47])))
wrong_top_left = dot_product_attention(latest, key, value, is_causal=True, q_positions=Contiguous(jnp.array([0])))
assert np.allclose(right, whole[:, -1:], atol=1e-5)
assert np.allclose(wrong_top_left, value[:, :1], atol=1e-6)
assert np.isfinite(wrong_top_left).all()
assert not np.allclose(wrong_top_left, right, atol=1e-1)

# %% [markdown]
# **Polarity.** True means "may attend", here and in `jax.nn`; in other libraries it means "hide". **Scale.** The
# default is $1/\sqrt{H}$ of the head size that is passed: whoever pads heads has to pass the scale of the true size.
# **Grouped heads.** Query head $n$ reads key head $\lfloor n/G\rfloor$; reading head $n \bmod K$ is the other common
# layout.

# %%
causal = jnp.tril(jnp.ones((48, 48), bool))[None, None]
wrong_polarity = dot_product_attention(query, key, value, mask=~causal)
assert np.allclose(dot_product_attention(query, key, value, mask=causal), whole, atol=1e-5)
assert np.isfinite(wrong_polarity).all()
assert not np.allclose(wrong_polarity, whole, atol=1e-1)

padded_query, padded_key = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 16))) for x in (query, key))
right_scale = dot_product_attention(padded_query, padded_key, value, is_causal=True, scale=16**-0.5)
wrong_scale = dot_product_attention(padded_query, padded_key, value, is_causal=True)
assert np.allclose(right_scale, whole, atol=1e-5)
assert not np.allclose(wrong_scale, whole, atol=1e-2)

four_heads = jax.random.normal(keys[3], (1, 48, 4, 16))
grouped = dot_product_attention(four_heads, key, value)
repeated = dot_product_attention(four_heads, jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2))
wrong_groups = dot_product_attention(four_heads, jnp.tile(key, (1, 1, 2, 1)), jnp.tile(value, (1, 1, 2, 1)))
assert np.allclose(grouped, repeated, atol=1e-5)
assert not np.allclose(grouped, wrong_groups, atol=1e-1)

# %% [markdown]
# **"No NaN" proves nothing**, and the converse holds too: a hidden key may hold NaN (memory that nobody wrote), and
# must touch neither the output nor a gradient. Weighting it with 0 is not enough, since $0\cdot\mathrm{NaN}$ is NaN.

# %%
unwritten = value.at[:, 40:].set(jnp.nan)
clean = dot_product_attention(query, key, unwritten, kv_lengths=jnp.array([40]))
weights = jnp.where(jnp.arange(48) < 40, 1 / 40, 0.0)
wrong_zero_weight = jnp.einsum("s,bsnh->bnh", weights, unwritten)
assert np.isfinite(clean).all()
assert np.allclose(clean, dot_product_attention(query, key[:, :40], value[:, :40]), atol=1e-5)
assert jnp.isnan(wrong_zero_weight).all()
