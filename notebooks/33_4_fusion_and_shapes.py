# %% [markdown]
# # 33.4 Fusion, compilation, replay, and shapes
#
# Arithmetic that stays the same can still cost less: by not writing intermediate results to memory (fusion), by
# deciding once instead of at every call (compilation), and by using few shapes (buckets). Each has its price, and eq.
# 33.9 says when a compilation pays.

# %%
from fractions import Fraction

import ipywidgets
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from flashspec import dot_product_attention
from flashspec.costs import break_even_calls, net_benefit, pays_off
from flashspec.fusion import matmul_epilogue
from flashspec.measure import compile_call, time_call
from flashspec.specialize import (
    ShapeBuckets,
    bucket_tradeoff,
    expected_extra_area,
    expected_padding,
    optimal_buckets,
    specialize,
)

# %% [markdown]
# ## What fusion does not write
#
# Take $y=\phi(xW+b)$. Done in three programs, $Z=xW$ is written, read, written with the bias added, and read again for
# the activation: $4\,|Z|$ elements that a fused tail of the product does not move. XLA's cost analysis counts the
# bytes that each compiled program reads and writes.

# %%
rows, inner, outer = 256, 64, 1024
x, w, b = jnp.ones((rows, inner)), jnp.ones((inner, outer)), jnp.ones((1, outer))
z = jnp.ones((rows, outer))


def moved(function, *arguments):
    """Bytes that the compiled program reads and writes, as XLA counts them."""
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["bytes accessed"]


def product(x, w):
    """x W."""
    return x @ w


def add(z, b):
    """Z + b."""
    return z + b


one_by_one = moved(product, x, w) + moved(add, z, b) + moved(jax.nn.relu, z)
least = sum(array.nbytes for array in (x, w, b, z))
extra = 4 * z.nbytes
print(f"three programs: {one_by_one / 1e6:.2f} MB; operands and result alone: {least / 1e6:.2f} MB")
print(f"difference: {(one_by_one - least) / 1e6:.2f} MB; 4 |Z| = {extra / 1e6:.2f} MB")
assert abs(one_by_one - least - extra) < 0.01 * extra
wrong_extra = 4 * x.nbytes  # the traffic goes with the elements of Z, not with those of the input
assert abs(one_by_one - least - wrong_extra) > 0.5 * extra

# %% [markdown]
# `matmul_epilogue` is that product with its tail as one operation, by a kernel of its own where there is one and by
# XLA's fusion elsewhere. **The tail comes after the whole sum.** Where the contraction is split, over tiles or over
# devices, the parts have to be added before the activation; an activation of each part is another function.

# %%
keys = jax.random.split(jax.random.key(0), 3)
x, w, b = (jax.random.normal(k, shape) for k, shape in zip(keys, [(8, inner), (inner, 16), (16,)], strict=True))
tail = matmul_epilogue(x, w, b, activation="relu")
assert np.allclose(tail, jax.nn.relu(add(product(x, w), b[None])), atol=1e-4)

halves = slice(0, inner // 2), slice(inner // 2, inner)
summed_first = jax.nn.relu(sum(product(x[:, half], w[half]) for half in halves) + b[None])
wrong_parts = sum(matmul_epilogue(x[:, half], w[half], b / 2, activation="relu") for half in halves)
assert np.allclose(tail, summed_first, atol=1e-4)
assert not np.allclose(tail, wrong_parts, atol=1e-1)

# %% [markdown]
# Fusion is no gain in itself: where an intermediate result has two users, fusing it into both computes it twice. Here
# $Z$ feeds two further products; computed once and kept, or once for each.


# %%
x, w = jnp.ones((rows, inner)), jnp.ones((inner, outer))


def kept_once(x, w, v1, v2):
    """Z is computed once for both."""
    z = jnp.tanh(x @ w)
    return z @ v1, z @ v2


def fused_into_both(x, w, v1, v2):
    """Each user computes its own Z, as when two kernels each hold it on the chip."""
    return jnp.tanh(x @ w) @ v1, jnp.tanh(jax.lax.optimization_barrier(x) @ w) @ v2


def operations(function, *arguments):
    """Floating-point operations of the program, as XLA counts them before it chooses library calls."""
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


v1 = v2 = jnp.ones((outer, 8))
once, twice = (operations(f, x, w, v1, v2) for f in (kept_once, fused_into_both))
print(f"operations: {once / 1e6:.1f} million with Z kept, {twice / 1e6:.1f} million with Z in both")
assert np.allclose(kept_once(x, w, v1, v2)[1], fused_into_both(x, w, v1, v2)[1])
wrong_always_less = twice <= once  # "fused is cheaper" is no law
assert not wrong_always_less

# %% [markdown]
# ## Compilation and replay are not the same
#
# *Compilation* makes a specialised program of a graph of operations. *Replay* submits a recorded sequence again and
# saves scheduling, without choosing any algorithm anew. `jax.jit` compiles; on a GPU, XLA may besides record the
# launches of a compiled program and replay them (command buffers). Op by op, every operation is a program and a
# dispatch of its own:


# %%
def chain(x):
    """Sixty small operations."""
    for _ in range(30):
        x = jnp.sin(x) * 0.5
    return x


small = jnp.ones(16)
op_by_op, compiled = time_call(lambda: chain(small), repeats=9), time_call(compile_call(chain, small), repeats=9)
assert np.allclose(chain(small), jax.jit(chain)(small), rtol=1e-5)

# %% tags=["varies"]
print(f"op by op {op_by_op.steady_s * 1e6:.0f} us, one program {compiled.steady_s * 1e6:.0f} us")

# %% [markdown]
# A branch may depend on three kinds of fact. On a *shape*: resolved while tracing, at the price of one program for
# each shape. On a *value on the device*: `lax.cond` and `lax.while_loop` keep it there. On a value that *Python*
# reads: that stops the host until the device is done, and under `jit` it is refused. A stop condition has to be of the
# second kind. Leaving it out to keep the graph whole changes what the user asked for.


# %%
def in_python(x):
    """Asks the device, from the host, whether to go on."""
    while x.sum() < 100.0:
        x = 2 * x
    return x


@jax.jit
def on_device(x):
    """The same loop, whose condition never leaves the device."""
    return jax.lax.while_loop(lambda x: x.sum() < 100.0, lambda x: 2 * x, x)


@jax.jit
def wrong_loop(x):
    """A fixed number of rounds, so that there is nothing to read: another function."""
    return jax.lax.fori_loop(0, 5, lambda _, x: 2 * x, x)


assert np.array_equal(in_python(small), on_device(small))
assert not np.array_equal(wrong_loop(small), on_device(small))
try:
    jax.jit(in_python)(small)
    wrong_capture = True
except jax.errors.TracerBoolConversionError as error:
    wrong_capture = False
    print(str(error).splitlines()[0])
assert not wrong_capture

# %% [markdown]
# ## When a compilation pays (eq. 33.9)
#
# Compiling takes $C$; each of $n$ calls then takes $t_c$ instead of $t_e$:
#
# $$C+nt_c<nt_e\quad\Longleftrightarrow\quad n>\frac{C}{t_e-t_c}. \tag{33.9}$$
#
# The chapter's example: $C=3$ s, from 2 ms to 1.5 ms. The inequality is strict: 6000 calls break even, 6001 gain.

# %%
C, before, after = 3, Fraction(2, 1000), Fraction(3, 2000)
needed = break_even_calls(C, before, after)
wrong_needed = C / (before - after)  # the quotient itself, where nothing is gained yet
benefit = net_benefit(C, int(wrong_needed), before, after)
print(f"pays from {needed} calls on; at {wrong_needed} the benefit is {benefit} s")
assert needed == 6001
assert pays_off(C, needed, before, after)
assert not pays_off(C, int(wrong_needed), before, after)

# %% [markdown]
# In binary floating point a difference like 0.4 ms - 0.3 ms is not exactly a tenth of a millisecond, and a quotient
# that is whole can come out on either side. `break_even_calls` reads a float as the decimal that it prints as.

# %%
floats, wrong_floats = break_even_calls(1.0, 0.0004, 0.0003), int(1.0 / (0.0004 - 0.0003)) + 1
print(f"1 s at 0.1 ms a call: {floats} calls; in plain floats {wrong_floats}")
assert floats == break_even_calls(1, Fraction(4, 10_000), Fraction(3, 10_000)) == 10_001
assert wrong_floats == 10_000


# %%
def draw(gain_ms=0.5, compile_s=3.0):
    """Net benefit over the number of calls."""
    calls = np.arange(0, 20001, 100)
    benefit = [net_benefit(compile_s, int(n), gain_ms / 1000, 0) for n in calls]
    _, axes = plt.subplots(figsize=(7, 3.2))
    axes.plot(calls, benefit)
    axes.axhline(0, color="gray", lw=0.5)
    axes.plot(break_even_calls(compile_s, gain_ms / 1000, 0), 0, "o")
    axes.set(xlabel="calls", ylabel="seconds saved", title=f"C = {compile_s:g} s, {gain_ms:g} ms saved a call")


draw()

# %% [markdown]
# With a running kernel:

# %%
ipywidgets.interact(draw, gain_ms=(0.1, 3.0, 0.1), compile_s=(0.5, 10.0, 0.5))
# %% [markdown]
# ## Shape buckets
#
# Each length $T$ runs in the smallest bucket that holds it, $b(T)$. What this costs depends on what is computed:
# $\mathbb{E}[b(T)-T]$ positions of padding, but $\mathbb{E}[b(T)^2-T^2]$ scores of dense attention. The second does
# not follow from the first. Two lengths, equally frequent, in one bucket or two:

# %%
lengths = {100: 1, 1000: 1}
one, two = ShapeBuckets((1000,)), ShapeBuckets((100, 1000))
padding, area = expected_padding(lengths, one), expected_extra_area(lengths, one)
wrong_area = (550 + padding) ** 2 - 550**2  # from the mean length and the mean padding
print(f"one bucket: {padding} positions, {area} scores a head; from the means it would be {wrong_area}")
assert padding == 450
assert area == Fraction(1000**2 - 100**2, 2)
assert wrong_area != area
assert expected_padding(lengths, two) == expected_extra_area(lengths, two) == 0

# %% [markdown]
# Which bounds are best? `optimal_buckets` finds them exactly, by dynamic programming over the observed lengths. Here
# lengths as requests have them, many short and a few long; powers of two as the usual choice beside it.

# %%
rng = np.random.default_rng(0)
observed = np.clip(np.round(np.exp(rng.normal(4.6, 0.8, size=400))), 8, 1024).astype(int)
powers = ShapeBuckets((16, 32, 64, 128, 256, 512, 1024))
best = optimal_buckets(observed, 7, cost="quadratic", multiple_of=8)
best_area, powers_area = expected_extra_area(observed, best), expected_extra_area(observed, powers)
print(f"seven best bounds {best.bounds}: {float(best_area):.0f} extra scores a call")
print(f"powers of two {powers.bounds}: {float(powers_area):.0f}")
assert best_area < powers_area
wrong_best = optimal_buckets(observed, 7, cost="linear", multiple_of=8)  # the best for padding is another choice
assert expected_extra_area(observed, wrong_best) > best_area

# %% [markdown]
# More buckets always pad less, and each is one more compilation and one more program to keep. The curve says where the
# next one stops being worth it.

# %%
figure, axes = plt.subplots(figsize=(7, 3.6))
for cost, label in (("linear", "padding, positions"), ("quadratic", "extra scores")):
    numbers, values = zip(*bucket_tradeoff(observed, 16, cost, multiple_of=8), strict=True)
    shares = np.array([float(v) for v in values]) / (observed.mean() if cost == "linear" else (observed**2.0).mean())
    axes.semilogy(numbers, shares, "o-", label=label)
    assert all(np.diff(shares) <= 0)
axes.set(xlabel="buckets", ylabel="extra work, share of the useful", title="the best choice for each number of buckets")
axes.legend()
wrong_share = float(expected_extra_area(observed, powers)) / (observed**2.0).mean()
axes.axhline(wrong_share, ls=":", color="gray")
axes.annotate("seven powers of two: extra scores", (8, wrong_share * 1.1))
assert wrong_share > shares[6]

# %% [markdown]
# A length above the last bound is an error, not a new compilation that nobody asked for.

# %%
try:
    powers.bucket_of(1025)
    wrong_growth = True
except ValueError as error:
    wrong_growth = False
    print(error)
assert not wrong_growth

# %% [markdown]
# ## Programs for buckets, and whether they paid
#
# `specialize` makes a function of any length out of one for a few: it pads to the bucket, runs an executable that was
# compiled ahead of time, and cuts the result. What makes that exact is the *length* that the function gets: what the
# padding holds must not change a bit. `check_padding` fills it with NaN, infinities and large numbers, and compares.


# %%
def attend(query, key, value, length):
    """Attention over the first `length` keys, which is what makes padding harmless."""
    return dot_product_attention(query, key, value, kv_lengths=length[None])


def wrong_attend(query, key, value, length):
    """Ignores the length: padded keys, all zero, take part in the softmax."""
    return dot_product_attention(query, key, value)


padded = {"in_axes": 1, "out_axes": 1, "length_arg": "length", "progress": False}
served, wrong_served = (specialize(f, (16, 64), **padded) for f in (attend, wrong_attend))
keys = jax.random.split(jax.random.key(0), 3)
query, key, value = (jax.random.normal(k, (1, 40, 2, 8)) for k in keys)
exact = dot_product_attention(query, key, value)
for T in (3, 16, 40):
    cut = dot_product_attention(query[:, :T], key[:, :T], value[:, :T])
    assert np.allclose(served(query[:, :T], key[:, :T], value[:, :T]), cut, atol=1e-5)
served.check_padding(query, key, value)
assert not np.allclose(wrong_served(query, key, value), exact, atol=1e-2)
try:
    wrong_served.check_padding(query, key, value)
    wrong_passes = True
except ValueError as error:
    wrong_passes = False
    print(error)
assert not wrong_passes

# %% [markdown]
# Its ledger keeps, for each bucket, what eq. 33.9 needs: $C$, $n$, $t_c$, and $t_e$ where it was measured.

# %% tags=["varies"]
for _ in range(20):
    served(query, key, value)
served.time_op_by_op(query, key, value)
print(served.ledger)
entry = served.ledger[64]

# %%
assert entry.calls == 21
net = net_benefit(entry.compile_s, entry.served, entry.time_before, entry.time_after)
assert (net > 0) == pays_off(entry.compile_s, entry.served, entry.time_before, entry.time_after)
wrong_net = entry.served * (entry.time_before - entry.time_after)  # what was saved, without what it cost
assert wrong_net > net
