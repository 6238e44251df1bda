# %% [markdown]
# # 33.6 Verifying several tokens, and the cache as a transaction
#
# A round drafts $x_1,\ldots,x_D$, reads all of them with *one* causal forward of the target, accepts up to the first
# rejection, and takes back what was written for the rest. This notebook watches rounds of a real pair of models,
# follows two lengths that are easily confused (tokens emitted, and positions that a cache holds), and then computes
# the law of whole texts exactly, with the right rollback and with a forgotten one.
#
# Texts sampled under one seed may differ between rules, batches and padded shapes: each uses its random numbers in
# another way. They are never the test. The law is.

# %%
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from experiments.pairs import load_pair
from flashspec import (
    LanguageModel,
    ModelDrafter,
    NgramDrafter,
    SamplingParams,
    generate,
    init_state,
    rollback,
    round_step,
)
from flashspec.speculative import STOP, Draws

# %% [markdown]
# ## One causal forward instead of five steps
#
# The target reads the pending token and the $D$ drafts at once. Row $i$ of its logits conditions on the drafts before
# it, so the $D+1$ rows are the laws at every prefix that verification may need. With the bundled pair (a target of 5.5
# million parameters, trained on Python code):

# %%
pair = load_pair()
prompt, prompt_length = pair.tokenizer.encode(["def fibonacci(n):\n    "])
apply = jax.jit(pair.target.apply)
fill = jax.jit(pair.target.fill, static_argnames="capacity")
cache = fill(pair.target_params, prompt[:, :-1], prompt_length - 1, capacity=64)
new = np.concatenate([prompt[:, -1:], pair.tokenizer.encode(["if n < 2"])[0]], axis=1)
at_once, _ = apply(pair.target_params, new, cache)

steps, stepped = [], cache
for i in range(new.shape[1]):
    logits, stepped = apply(pair.target_params, new[:, i : i + 1], stepped)
    steps.append(np.asarray(logits)[:, 0])
row = np.concatenate([prompt[:, :-1], new], axis=1)
uncached, _ = apply(pair.target_params, row, pair.target.init_cache(1, 64))  # the whole row, from nothing
wrong_at_once, _ = apply(pair.target_params, new, rollback(cache, cache.length - 1))  # one position too early
for logits in (np.stack(steps, 1), uncached[:, -new.shape[1] :]):
    assert np.allclose(at_once, logits, atol=1e-3)
    assert not np.allclose(wrong_at_once, logits, atol=1e-1)

# %% [markdown]
# ## Rounds of a real generation
#
# The transaction of a round, for a row of length $L$ whose last token is *pending*, that is emitted but in no cache:
#
# | step | tokens emitted | positions in each cache |
# |---|---|---|
# | before | $L$ | $L-1$ |
# | draft and target have read the pending token and the drafts | $L$ | $L+D$ |
# | $j$ drafts accepted, one more token drawn | $L+j+1$ | $L+D$ |
# | rolled back | $L+j+1$ | $L+j$ |
#
# The token drawn at the end, correction or bonus, has been read by no model. It is the pending one of the next round.
# The draft runs $D+1$ forwards, the last one only to write its own cache, so that both caches stay alike even when all
# drafts are accepted.

# %%
D, ROUNDS = 4, 9
state = init_state(
    jax.random.key(1),
    pair.target,
    pair.target_params,
    prompt,
    prompt_length,
    drafter=pair.drafter,
    draft_length=D,
    sampling=SamplingParams(temperature=0.8, top_k=None, top_p=None),
    max_new_tokens=60,
)
step = jax.jit(round_step)
trace = []
for _ in range(ROUNDS):
    before, (state, info) = state, step(state)
    trace.append((before, info))
    L, emitted = int(before.lengths[0]), int(info.emitted[0])
    accepted = int(info.accepted.sum())
    assert emitted == accepted + 1
    assert int(state.lengths[0]) == L + accepted + 1
    for held in (state.target_cache.length, state.draft_cache.length):
        assert int(held[0]) == L + accepted == int(state.lengths[0]) - 1
        wrong_held = int(state.lengths[0])  # "a cache holds what was emitted"
        assert int(held[0]) != wrong_held
    kept = np.asarray(info.tokens)[0, :accepted]
    assert np.array_equal(kept, np.asarray(info.draft_tokens)[0, :accepted])

# %% tags=["varies"]
for number, (before, info) in enumerate(trace):
    drafts = [pair.tokenizer.decode(np.asarray(info.draft_tokens)[:, i : i + 1])[0] for i in range(D)]
    out = pair.tokenizer.decode(info.tokens, info.emitted)[0]
    L = int(before.lengths[0])
    counts = f"L = {L:2}, caches {L - 1:2}, accepted {int(info.accepted.sum())}"
    print(f"round {number}: {counts}, drafts {drafts}, out {out!r}")
print("\n" + pair.tokenizer.decode(state.tokens, state.lengths)[0])

# %% [markdown]
# The same as a picture: one line a round, one box a position. Blue was accepted, grey crossed out was drafted and
# taken back, orange is the token drawn at the end. The thick line is where both caches end after the round: always in
# front of the orange box.

# %% tags=["varies"]
figure, axes = plt.subplots(figsize=(11, 4.2))
start = int(prompt_length[0])
for line, (before, info) in enumerate(trace):
    L, accepted = int(before.lengths[0]), int(info.accepted.sum())
    texts = [pair.tokenizer.decode(np.asarray(info.draft_tokens)[:, i : i + 1])[0] for i in range(D)]
    last = pair.tokenizer.decode(np.asarray(info.tokens)[:, accepted : accepted + 1])[0]
    boxes = [(L + i, texts[i], "C0" if i < accepted else "lightgray") for i in range(D)]
    axes.barh(line, L - start, left=start, height=0.2, color="black", alpha=0.15)
    for at, text, colour in boxes:
        axes.barh(line, 0.94, left=at, height=0.8, color=colour, alpha=0.7)
        axes.text(at + 0.47, line - 0.15, repr(text)[1:-1], ha="center", va="center", fontsize=6)
    axes.barh(line + 0.2, 0.94, left=L + accepted, height=0.4, color="C1")
    axes.text(L + accepted + 0.47, line + 0.2, repr(last)[1:-1], ha="center", va="center", fontsize=6)
    axes.plot([L + accepted] * 2, [line - 0.45, line + 0.45], "k-", lw=3)
axes.set(xlabel="position in the row", ylabel="round", yticks=range(ROUNDS))
axes.invert_yaxis()

# %% [markdown]
# ## The law of whole texts
#
# At one position the output is distributed as $p$ (eq. 33.13). For texts: suppose the confirmed prefix has its right
# law. The target's row used next conditions on exactly this prefix, because a row is only reached when all drafts
# before it were accepted. So the next token has the law $p(\cdot\mid\text{prefix})$, and the longer prefix its right
# law too. By induction the text is distributed as the target's own, **provided that the caches hold that prefix and
# nothing else.**
#
# A model small enough to enumerate: two tokens, two steps. The first token is a fair coin; the second repeats it with
# probability $\tfrac34$. The model reads the first token *from its cache*, slot 1, as attention would. The draft
# always says 0 with probability $\tfrac34$.


# %%
class TokenCache(NamedTuple):
    """A cache of our own: the tokens themselves, and how many of them count."""

    tokens: jax.Array  # [B, capacity]
    length: jax.Array  # [B]


def init_cache(batch, capacity):
    """An empty cache."""
    return TokenCache(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))


def apply_target(table, tokens, cache):
    """Row 0 of the table at position 0; after that the row of the token in slot 1."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    positions = cache.length[:, None] + jnp.arange(tokens.shape[1])[None, :]
    written = cache.tokens.at[rows, positions].set(tokens, mode="drop")
    row = jnp.where(positions == 0, 0, 1 + written[:, 1:2])
    return table[row], TokenCache(written, cache.length + tokens.shape[1])


def apply_draft(table, tokens, cache):
    """The same law everywhere."""
    return jnp.broadcast_to(table, (*tokens.shape, 2)), cache._replace(length=cache.length + tokens.shape[1])


TABLE = jnp.log(jnp.array([[1 / 2, 1 / 2], [3 / 4, 1 / 4], [1 / 4, 3 / 4]]))
drafter = ModelDrafter(LanguageModel(apply_draft, init_cache, 2), jnp.log(jnp.array([3 / 4, 1 / 4])))
right_model = LanguageModel(apply_target, init_cache, 2)
wrong_model = LanguageModel(
    apply_target, init_cache, 2, rollback=lambda cache, length: cache
)  # keeps what was rejected

# %% [markdown]
# All random numbers of two rounds, on a grid of cells fine enough for every threshold: 4 x 3 x 4 cells for draft, coin
# and final draw, so $48^2$ rows, each equally likely. Counting them gives the law without any sampling error.


# %%
def law_of_texts(model):
    """The law of (first, second token) over all draws of two rounds with D = 1."""
    one_round = list(itertools.product(range(4), range(3), range(4)))
    draws = (np.array(list(itertools.product(one_round, one_round))) + 0.5) / np.array([4, 3, 4])
    batch = len(draws)
    state = init_state(
        jax.random.key(0),
        model,
        TABLE,
        jnp.zeros((batch, 1), jnp.int32),
        jnp.ones(batch, jnp.int32),
        drafter=drafter,
        draft_length=1,
        max_new_tokens=2,
    )
    for one in draws.transpose(1, 2, 0).astype(np.float32):
        state, _ = round_step(state, draws=Draws(one[0][:, None], one[1][:, None], one[2]))
    assert (state.lengths == 3).all()
    text = 2 * state.tokens[:, 1] + state.tokens[:, 2]
    return np.bincount(text, minlength=4) / batch


law, wrong_law = law_of_texts(right_model), law_of_texts(wrong_model)
print("text            00     01     10     11")
print("target       ", *(f"{x:.3f} " for x in (3 / 8, 1 / 8, 1 / 8, 3 / 8)))
print("rounds       ", *(f"{x:.3f} " for x in law))
print("no rollback  ", *(f"{x:.3f} " for x in wrong_law))
assert np.array_equal(law, [3 / 8, 1 / 8, 1 / 8, 3 / 8])
assert np.array_equal(wrong_law, [3 / 8, 1 / 8, 1 / 4, 1 / 4])

# %% [markdown]
# Nothing in the wrong texts looks wrong. After a rejected 0 the correction 1 was emitted, but slot 1 still held the 0,
# and the second token was drawn as if the text had begun with it.
#
# ## Stop tokens and the budget
#
# A stop token ends its row at once, whether it was an accepted draft or the token drawn at the end: nothing after it,
# and no bonus. Then the length budget cuts. What is committed is $\min(\text{accepted}+1,\ \text{budget},\
# \text{stop})$, for tokens and both caches alike. Four thousand rows of a small table model:

# %%
V, END = 4, 3
rng = np.random.default_rng(0)
bigram_law, draft_law = rng.dirichlet(np.full(V, 2), size=V), rng.dirichlet(np.full(V, 2), size=V)


def no_cache(batch, capacity):
    """A bigram model remembers nothing but how long the row is."""
    return TokenCache(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32))


def apply_bigram(table, tokens, cache):
    """The next token depends on the last one."""
    return table[tokens], cache._replace(length=cache.length + tokens.shape[1])


bigram = LanguageModel(apply_bigram, no_cache, V)
target_table, draft_table = (jnp.log(jnp.asarray(law, jnp.float32)) for law in (bigram_law, draft_law))
B = 4096


def sample(budget, stop_tokens=(), **options):
    """New tokens [B, budget], how many there are, and why each row ended."""
    result = generate(
        jax.random.key(3),
        bigram,
        target_table,
        np.zeros((B, 1), np.int32),
        np.ones(B, np.int32),
        max_new_tokens=budget,
        stop_tokens=stop_tokens,
        **options,
    )
    return np.asarray(result.tokens)[:, 1:], np.asarray(result.lengths) - 1, np.asarray(result.finish_reason)


drafting = {"drafter": ModelDrafter(bigram, draft_table), "draft_length": 3}
tokens, counts, reasons = sample(6, stop_tokens=(END,), **drafting)
inside = np.arange(6)[None] < counts[:, None]
stops = (tokens == END) & inside
assert (stops.sum(1) == (reasons == STOP)).all()  # one stop token where the row stopped, none elsewhere
assert all(tokens[row, counts[row] - 1] == END for row in np.flatnonzero(reasons == STOP))
assert (counts[reasons != STOP] == 6).all()
print(
    f"{(reasons == STOP).mean():.0%} of the rows stopped, after {counts[reasons == STOP].mean():.1f} tokens on average"
)

unstopped, _, _ = sample(6, **drafting)
wrong_rows = ((unstopped[:, :-1] == END) & (unstopped[:, 1:] != END)).any(1)  # ignoring the stop, to be cut "later"
assert wrong_rows.any()

# %% [markdown]
# ## One key, other texts, one law
#
# Plain decoding and speculation by three means, all with the same key. The rows differ in what they say. The
# frequencies of all 16 texts of two tokens agree with the exact law, which for a bigram model is a product.

# %%
exact = (bigram_law[0][:, None] * bigram_law).ravel()
bound = np.sqrt((2 * V**2 * np.log(2) + 2 * np.log(1e9)) / B)
ways = {
    "plain": {},
    "chain": drafting,
    "match": {**drafting, "rule": "match"},
    "n-grams": {"drafter": NgramDrafter(2), "draft_length": 3},
}
texts = {}
for name, options in ways.items():
    tokens, _, _ = sample(2, **options)
    texts[name] = V * tokens[:, 0] + tokens[:, 1]
    distance = np.abs(np.bincount(texts[name], minlength=V**2) / B - exact).sum()
    print(f"{name:8} rows with the text of plain decoding: {(texts[name] == texts['plain']).mean():4.0%}")
    assert distance < bound, name
wrong_test = (texts["chain"] == texts["plain"]).all()  # comparing texts would call an exact rule wrong
assert not wrong_test

figure, axes = plt.subplots(figsize=(8, 3.2))
for place, name in enumerate(ways):
    axes.bar(np.arange(V**2) + 0.2 * (place - 1.5), np.bincount(texts[name], minlength=V**2) / B, 0.18, label=name)
axes.plot(np.arange(V**2), exact, "k_", ms=14, label="exact")
axes.set(xticks=range(V**2), xticklabels=[f"{i}{j}" for i in range(V) for j in range(V)], title="law of two tokens")
axes.legend()
