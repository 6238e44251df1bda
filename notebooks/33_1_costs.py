# %% [markdown]
# # 33.1 What a computation costs: arithmetic, transfer, launch
#
# A piece of work needs $F$ operations and moves $Q_b$ bytes. On a device that computes at the rate $R$ and moves data
# at the bandwidth $b$ it takes at least
#
# $$\max\left(\frac{F}{R},\ \frac{Q_b}{b}\right)$$
#
# seconds. This is a lower bound: the two may overlap, and launches, synchronisation and layout changes come on top.
# This notebook draws the bound, measures a launch, and then asks what an optimisation of one part does for the whole
# (eq. 33.1).

# %%
import math
from fractions import Fraction

import ipywidgets
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from flashspec import plan_attention
from flashspec.calibration import calibrate
from flashspec.costs import amdahl_speedup, roofline, sourced_rates
from flashspec.devices import device_facts
from flashspec.measure import compile_call, time_call

# %% [markdown]
# ## The bound $\max(F/R, Q_b/b)$
#
# `plan_attention` counts $F$ and $Q_b$ of an attention call from shapes alone; `roofline` bounds the time of any work,
# here with the rates of the H200's data sheet. Four calls of one decoder layer (32 query heads, 8 key/value heads of
# size 128, bfloat16): prefill, one step of plain decoding, and the verification of 5 and of 16 tokens.

# %%
H200 = device_facts("NVIDIA H200")
rates = sourced_rates(H200, itemsize=2)


def plan(T, S):
    """The plan of T new queries at the end of S keys."""
    query = jax.ShapeDtypeStruct((1, T, 32, 128), jnp.bfloat16)
    key = value = jax.ShapeDtypeStruct((1, S, 8, 128), jnp.bfloat16)
    return plan_attention(query, key, value, is_causal=True, q_positions=jnp.arange(S - T, S), device="NVIDIA H200")


calls = {
    "prefill, T = S = 8192": plan(8192, 8192).forward,
    "decoding, T = 1, S = 8192": plan(1, 8192).forward,
    "verification, T = 5, S = 8192": plan(5, 8192).forward,
    "verification, T = 16, S = 8192": plan(16, 8192).forward,
}
for name, call in calls.items():
    bound = roofline(call.flops, call.bytes, rates)
    print(
        f"{name:31} F/R = {bound.compute_s * 1e6:7.2f} us   Q/b = {bound.memory_s * 1e6:5.2f} us   "
        f"at least {bound.lower_bound_s * 1e6:7.2f} us, bound by {bound.bound_by}"
    )
    assert math.isclose(call.lower_bound_seconds, bound.lower_bound_s)
    wrong_sum = bound.compute_s + bound.memory_s  # the two can overlap, so their sum is no lower bound
    assert wrong_sum > bound.lower_bound_s

# %% [markdown]
# Verifying five tokens takes five times the arithmetic of decoding one, and yet the same time: the keys and values are
# read once for all of them. **Operations alone do not tell which of two calls is slower.** This is the whole reason
# why speculative decoding can gain anything.

# %%
one, five = calls["decoding, T = 1, S = 8192"], calls["verification, T = 5, S = 8192"]
time_ratio = five.lower_bound_seconds / one.lower_bound_seconds
wrong_ratio = five.flops / one.flops
print(f"five tokens instead of one: {time_ratio:.3f} times the time; {wrong_ratio:.0f} times the operations")
assert time_ratio < 1.01
assert wrong_ratio == 5

# %% [markdown]
# The same as a picture. The rate that a call can reach grows with its intensity $F/Q_b$ (operations a byte) along the
# slope $b$, up to the roof $R$.

# %%
intensity = np.logspace(-0.5, 4, 200)
roof = np.minimum(H200.bf16_flops, intensity * H200.memory_bandwidth)
figure, axes = plt.subplots(figsize=(7, 4))
axes.loglog(intensity, roof / 1e12, "k-")
for name, call in calls.items():
    at = call.flops / call.bytes
    axes.plot(at, min(H200.bf16_flops, at * H200.memory_bandwidth) / 1e12, "o", label=name)
axes.set(xlabel="operations a byte", ylabel="TFLOP/s at most", title=f"{H200.name}, bfloat16: data sheet, not measured")
axes.legend()
# %% [markdown]
# ## The launch
#
# Small work is bound by neither: its time is that of starting it. `calibrate` measures the rates of *this* machine in
# a second: a product, a copy, and a program that does nothing, which is the launch. Beside the launch, the measured
# time of $x + 1$ over the bytes that it moves. On the left the curve is flat: making the array smaller makes nothing
# faster.

# %% tags=["varies"]
here = calibrate()
sizes = [2**power for power in range(4, 23, 3)]
seconds = []
for size in sizes:
    call = compile_call(lambda x: x + 1, jnp.zeros(size, jnp.float32))
    seconds.append(time_call(call, repeats=21).steady_s)
moved = [8 * size for size in sizes]
figure, axes = plt.subplots(figsize=(7, 3.5))
axes.loglog(moved, np.array(seconds) * 1e6, "o-", label="x + 1")
axes.axhline(here.launch_s * 1e6, ls="--", color="gray", label="an empty program")
axes.set(xlabel="bytes read and written", ylabel="us a call", title=f"on {jax.devices()[0].device_kind}")
axes.legend()
print(f"a launch takes {here.launch_s * 1e6:.1f} us; {moved[0]} bytes take {seconds[0] * 1e6:.1f} us")

# %%
assert roofline(sizes[0], moved[0], here).bound_by == "launch"
times_longer = seconds[2] / seconds[0]
wrong_times_longer = moved[2] / moved[0]  # if bytes alone counted
assert times_longer < 16
assert wrong_times_longer == 64

# %% [markdown]
# ## Amdahl's law (eq. 33.1)
#
# A part takes the share $f$ of the time and becomes $s$ times faster; the rest stays as it is. With $T$ the original
# time, the new time is $(1 - f)T + fT/s$, so
#
# $$S = \frac{1}{(1 - f) + \frac{f}{s}}. \tag{33.1}$$
#
# The chapter's example: an operator with 40% of the time becomes 4 times faster. `Fraction`s go in, and the exact
# answer comes out.

# %%
whole = amdahl_speedup(Fraction(2, 5), 4)
wrong_weighted = Fraction(2, 5) * 4 + Fraction(3, 5) * 1  # averaging speed-ups instead of times
print(
    f"S = {whole} = {float(whole):.3f}; the weighted average of the speed-ups, {float(wrong_weighted):.2f}, is not it"
)
assert whole == Fraction(10, 7)
assert wrong_weighted != whole

# %% [markdown]
# However fast the part becomes, the whole gains at most $1/(1-f)$. And what the optimisation adds (a layout change, a
# synchronisation) counts in full: with a new cost $o$ as a share of the old time the denominator is $(1-f)+f/s+o$.

# %%
limit = amdahl_speedup(Fraction(2, 5), math.inf)
with_overhead = amdahl_speedup(Fraction(2, 5), 4, overhead=Fraction(3, 10))
wrong_free = whole  # the same layout change, left out of the account
print(f"s infinite: {limit}; s = 4 with an overhead of 30%: {with_overhead}, nothing gained (not {wrong_free})")
assert limit == Fraction(5, 3)
assert with_overhead == 1
assert wrong_free > with_overhead


# %%
def draw(overhead=0.0):
    """S over s for four shares of the time."""
    _, axes = plt.subplots(figsize=(7, 4))
    speedups = np.logspace(0, 2, 60)
    for share in (0.2, 0.4, 0.8, 0.95):
        (line,) = axes.semilogx(
            speedups, [amdahl_speedup(share, s, overhead) for s in speedups], label=f"f = {share:.0%}"
        )
        axes.axhline(amdahl_speedup(share, math.inf, overhead), ls=":", color=line.get_color())
    axes.axhline(1, color="gray", lw=0.5)
    axes.set(xlabel="s, speed-up of the part", ylabel="S, speed-up of the whole", ylim=(0.5, 8))
    axes.set_title(f"eq. 33.1 with overhead {overhead:.0%}; dotted: s infinite")
    axes.legend()


draw()

# %% [markdown]
# With a running kernel, the same plot with a slider:

# %%
ipywidgets.interact(draw, overhead=(0.0, 0.5, 0.05))
