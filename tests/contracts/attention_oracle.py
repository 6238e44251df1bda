"""A naive oracle of attention in numpy and float64, its gradients by eq. 33.6 to 33.8, and random calls to hold it to.

It shares nothing with the library but the dropout bits. `wrong` plants a classic mistake: the suites show that their
comparison notices each of them.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.attention import dot_product_attention
from flashspec.attention.backends import BACKENDS, Backend
from flashspec.attention.blockwise import Blocks, blockwise_attention, blockwise_stats
from flashspec.attention.dropout import make_dropout
from flashspec.attention.settings import AttentionImplementation
from flashspec.masks import Contiguous

DIFFERENTIATED = ("query", "key", "value", "bias", "sinks")

WRONG_FORWARD = (
    "top-left alignment",
    "polarity flipped",
    "head n mod K",
    "one key dropped",
    "window off by one",
    "local outputs added",
    "local outputs averaged",
    "scale missing",
    "scale doubled",
    "bias scaled",
    "cap after the mask",
    "sink capped",
    "dropout on the normaliser",
)
WRONG_BACKWARD = ("fresh dropout in the backward", "no row mean", "lse without gradient", "bias gradient of one row")


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    """Within it, "tiles" is the blockwise backend with tiles so small that little arrays have many.

    Compiling is most of what the suites do, so XLA is asked for little optimisation; what it computes stays the same.
    """
    blocks = Blocks(query=3, key=4)
    BACKENDS["tiles"] = Backend(  # type: ignore[index]
        "tiles",
        BACKENDS["blockwise"].supports,
        lambda request, operands: blockwise_attention(request, operands, blocks),
        lambda request, operands: blockwise_stats(request, operands, blocks),
    )
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    del BACKENDS["tiles"]  # type: ignore[attr-defined]


@dataclasses.dataclass
class Case:
    """One call: the keyword arguments of `dot_product_attention` as numpy arrays, and cotangents of its results."""

    arguments: dict[str, Any]
    g_output: np.ndarray
    g_lse: np.ndarray

    @property
    def sizes(self) -> tuple[int, ...]:
        """B, T, S, N, K, H, Hv."""
        (B, T, N, H), (_, S, K, Hv) = self.arguments["query"].shape, self.arguments["value"].shape
        return B, T, S, N, K, H, Hv


@dataclasses.dataclass
class Result:
    output: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]


def visible_pairs(arguments: dict[str, Any], sizes: tuple[int, ...], wrong: str | None = None) -> np.ndarray:
    """[B, N, T, S], pair by pair."""
    B, T, S, N, *_ = sizes

    def at(name: str, default: Any, b: int, i: int) -> Any:
        array = arguments.get(name)
        if isinstance(array, Contiguous):
            return np.broadcast_to(array.start, B)[b] + i
        return default if array is None else np.broadcast_to(array, (B, array.shape[-1]))[b, i]

    def length(name: str, default: int, b: int) -> int:
        return default if arguments.get(name) is None else int(arguments[name][b])

    left, right = arguments.get("window") or (None, None)
    if wrong == "window off by one" and left is not None:
        left += 1
    explicit = arguments.get("mask")
    explicit = np.ones((1, 1, 1, 1), bool) if explicit is None else explicit ^ (wrong == "polarity flipped")
    visible = np.broadcast_to(explicit, (B, N, T, S)).copy()
    for b, t, s in np.ndindex(B, T, S):
        q = t if wrong == "top-left alignment" else int(at("q_positions", t, b, t))
        distance = q - int(at("kv_positions", s, b, s))
        visible[b, :, t, s] &= bool(
            (not arguments.get("is_causal") or distance >= 0)
            and (left is None or distance <= left)
            and (right is None or -distance <= right)
            and t < length("q_lengths", T, b)
            and s < length("kv_lengths", S, b)
            and at("q_segment_ids", 0, b, t) == at("kv_segment_ids", 0, b, s)
        )
    if wrong == "one key dropped" and S:
        visible[..., S // 2] = False
    if arguments.get("bias") is not None:
        visible &= np.broadcast_to(arguments["bias"] != -np.inf, visible.shape)
    return visible


def keep_mask(arguments: dict[str, Any], sizes: tuple[int, ...], key: jax.Array | None = None) -> np.ndarray:
    """keep / (1 - rate), [B, N, T, S]; the bits are the library's own."""
    B, T, S, N, *_ = sizes
    rate = arguments.get("dropout_rate", 0.0)
    if rate == 0:
        return np.ones((B, N, T, S))
    offsets = arguments.get("dropout_offsets")
    dropout = make_dropout(
        arguments["dropout_key"] if key is None else key,
        rate,
        arguments.get("dropout_broadcast", ()),
        np.zeros(4, np.int32) if offsets is None else np.asarray(offsets),
    )
    kept = jax.jit(lambda: dropout.tile(B, N, 0, T, 0, S))()
    return np.broadcast_to(np.asarray(kept), (B, N, T, S)) / (1 - rate)


def oracle(case: Case, wrong: str | None = None) -> Result:
    """Output, lse and gradients of a case in float64; `wrong` is one of the planted mistakes, or None."""
    given, sizes = case.arguments, case.sizes
    B, _, S, N, K, H, _ = sizes
    head = np.arange(N) % K if wrong == "head n mod K" else np.arange(N) // (N // K)
    visible = visible_pairs(given, sizes, wrong)
    q = np.where(visible.any(3).swapaxes(1, 2)[..., None], np.asarray(given["query"], float), 0)
    used = np.zeros((B, K, S), bool)
    for n in range(N):
        used[:, head[n]] |= visible[:, n].any(1)
    used = used.swapaxes(1, 2)[..., None]
    k, v = (np.where(used, np.asarray(given[name], float), 0)[:, :, head] for name in ("key", "value"))

    scale = 1 / math.sqrt(H) if given.get("scale") is None else given["scale"]
    scale = {"scale missing": 1.0, "scale doubled": 2 * scale}.get(wrong or "", scale)
    x = scale * np.einsum("btnh,bsnh->bnts", q, k)
    if given.get("bias") is not None:
        bias = np.broadcast_to(np.asarray(given["bias"], float), x.shape)
        x = x + np.where(visible, bias, 0) * (scale if wrong == "bias scaled" else 1)
    cap = given.get("logits_soft_cap")
    z = x if cap is None else cap * np.tanh(x / cap)
    if wrong == "cap after the mask" and cap is not None:
        z, visible = np.where(visible, z, -cap), np.ones_like(visible)
    sinks = None if given.get("sinks") is None else np.asarray(given["sinks"], float)
    if wrong == "sink capped" and sinks is not None and cap is not None:
        sinks = cap * np.tanh(sinks / cap)

    keep = keep_mask(given, sizes)
    p, lse, p_sink = normalised(z, visible, sinks, keep if wrong == "dropout on the normaliser" else 1)
    output = np.einsum("bnts,bsnv->btnv", p * keep, v)
    if wrong in ("local outputs added", "local outputs averaged"):
        halves = []
        for part in (np.arange(S) < S // 2, np.arange(S) >= S // 2):
            local, _, _ = normalised(z, visible & part, sinks, 1)
            halves.append(np.einsum("bnts,bsnv->btnv", local * keep, v))
        output = sum(halves) / (2 if wrong == "local outputs averaged" else 1)

    if wrong == "fresh dropout in the backward":
        keep = keep_mask(given, sizes, jax.random.key(999))
    g_output, g_lse = case.g_output.astype(float), np.where(np.isfinite(lse), case.g_lse, 0).swapaxes(1, 2)
    g_lse = g_lse * (wrong != "lse without gradient")
    g_v = np.einsum("bnts,btnv->bsnv", p * keep, g_output)
    g_p = keep * np.einsum("btnv,bsnv->bnts", g_output, v)
    mean = np.sum(p * g_p, axis=3, keepdims=True) * (wrong != "no row mean")
    g_z = p * (g_p - mean + g_lse[..., None])
    g_x = np.where(visible, g_z if cap is None else g_z * (1 - (z / cap) ** 2), 0)
    gradients = {
        "query": scale * np.einsum("bnts,bsnh->btnh", g_x, k),
        "key": grouped(scale * np.einsum("bnts,btnh->bsnh", g_x, q), head, K),
        "value": grouped(g_v, head, K),
    }
    if given.get("bias") is not None:
        axes = tuple(i for i, size in enumerate(given["bias"].shape) if size != g_x.shape[i])
        gradients["bias"] = np.sum(g_x[:1] if wrong == "bias gradient of one row" else g_x, axis=axes, keepdims=True)
        gradients["bias"] = np.broadcast_to(gradients["bias"], given["bias"].shape)
    if sinks is not None:
        gradients["sinks"] = np.sum(p_sink * (g_lse - mean[..., 0]), axis=(0, 2))
    return Result(output, lse, gradients)


def normalised(
    z: np.ndarray, visible: np.ndarray, sinks: np.ndarray | None, weight: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities [B, N, T, S], lse [B, T, N], and the sink's probability [B, N, T]."""
    B, N, T, _ = z.shape
    z = np.where(visible, z, -np.inf)
    extra = np.full((B, N, T, 1), -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(sinks[None, :, None, None], extra.shape)
    top = np.max(np.concatenate([z, extra], axis=3), axis=3, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    mass, sink = np.exp(z - top) * visible, np.exp(extra - top)
    total = np.sum(mass * weight, axis=3, keepdims=True) + sink
    safe = np.where(total > 0, total, 1)
    lse = np.where(total > 0, top + np.log(safe), -np.inf)[..., 0]
    return mass / safe, lse.swapaxes(1, 2), (sink / safe)[..., 0]


def grouped(x: np.ndarray, head: np.ndarray, K: int) -> np.ndarray:
    """Gradients of query heads summed over the key/value head that each reads."""
    total = np.zeros((*x.shape[:2], K, x.shape[3]))
    for n, k in enumerate(head):
        total[:, :, k] += x[:, :, n]
    return total


def run(case: Case, implementation: AttentionImplementation, return_lse: bool = True) -> Result:
    """The library's results for a case, in one compiled program; without lse, that is 0 and so is its cotangent."""
    arrays = {name: x for name, x in case.arguments.items() if isinstance(x, np.ndarray | jax.Array | Contiguous)}
    static = tuple((name, x) for name, x in case.arguments.items() if name not in arrays)
    moved = {name: arrays.pop(name) for name in DIFFERENTIATED if name in arrays}
    static += (("implementation", implementation), ("return_lse", return_lse))
    return Result(*jax.device_get(_program(static, moved, arrays, case.g_output, case.g_lse)))


@functools.partial(jax.jit, static_argnums=0)
def _program(static: tuple, moved: dict, arrays: dict, g_output: jax.Array, g_lse: jax.Array) -> tuple[Any, ...]:
    def call(moved: dict) -> tuple[jax.Array, jax.Array]:
        results = dot_product_attention(**moved, **arrays, **dict(static))
        return results if dict(static)["return_lse"] else (results, jnp.zeros(g_lse.shape, jnp.float32))

    (output, lse), pull = jax.vjp(call, moved)
    (gradients,) = pull((g_output.astype(output.dtype), g_lse.astype(lse.dtype)))
    return output, lse, gradients


def assert_close(got: Result, want: Result, tolerance: float = 3e-5) -> None:
    """Equal up to rounding: forward and every gradient, scaled by each array's own size."""
    pairs = {"output": (got.output, want.output), "lse": (got.lse, want.lse)}
    pairs |= {name: (got.gradients[name], want.gradients[name]) for name in want.gradients}
    for name, (x, y) in pairs.items():
        assert x.shape == y.shape, name
        finite = y[np.isfinite(y)]
        atol = tolerance * max(1.0, np.max(np.abs(finite), initial=0.0))
        np.testing.assert_allclose(np.asarray(x, float), y, rtol=tolerance, atol=atol, err_msg=name)


def plain(case: Case) -> Result:
    """The formula of eq. 33.2 in the dtype of its inputs, differentiated by JAX; options: mask, scale, cap, sinks."""
    given = case.arguments
    visible = visible_pairs(given, case.sizes)
    scale, cap = given.get("scale") or case.sizes[5] ** -0.5, given.get("logits_soft_cap")

    def call(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
        groups = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
        z = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
        z = z if cap is None else cap * jnp.tanh(z / cap)
        z = jnp.where(visible, z, -jnp.inf)
        sinks = jnp.broadcast_to(sinks.astype(z.dtype)[None, :, None, None], (*z.shape[:3], 1))
        z = jnp.concatenate([z, sinks], axis=3)
        output = jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(z, axis=-1)[..., :-1], value)
        return output, jnp.swapaxes(jax.nn.logsumexp(z, axis=-1), 1, 2)

    @jax.jit
    def program(operands: list[jax.Array], g_output: jax.Array, g_lse: jax.Array) -> tuple[Any, ...]:
        (output, lse), pull = jax.vjp(call, *operands)
        return output, lse, pull((g_output.astype(output.dtype), g_lse.astype(lse.dtype)))

    no_sink = np.full(case.sizes[3], np.finfo(np.float16).min, np.float32)  # so low that its weight is 0
    operands = [*(given[name] for name in ("query", "key", "value")), given.get("sinks", no_sink)]
    output, lse, gradients = program(operands, case.g_output, case.g_lse)
    names = ("query", "key", "value", "sinks")
    return Result(np.asarray(output), np.asarray(lse), dict(zip(names, map(np.asarray, gradients), strict=True)))


def errors(got: Result, want: Result) -> dict[str, float]:
    """Relative error of each result in the Frobenius norm."""
    pairs = {"output": (got.output, want.output)}
    pairs |= {name: (got.gradients[name], want.gradients[name]) for name in want.gradients}
    return {name: np.linalg.norm(np.asarray(x, float) - y) / np.linalg.norm(y) for name, (x, y) in pairs.items()}


def assert_no_worse(got: Result, case: Case) -> None:
    """At most twice the error of the plain formula in the dtype of the inputs, for each result."""
    want = oracle(case)
    bound = errors(plain(case), want)
    for name, error in errors(got, want).items():
        assert error <= 2 * bound[name], (name, error, bound[name])


# Random calls.

LEVELS: dict[str, Sequence[Any]] = {
    "sizes": [(2, 5, 7, 4, 2, 8, 6), (1, 1, 9, 4, 4, 8, 8), (2, 6, 6, 3, 1, 4, 4)],
    "positions": [None, "causal", "window", "causal window"],
    "explicit": [None, "full", "broadcast"],
    "bias": [None, "full", "broadcast"],
    "lengths": [False, True],
    "segments": [False, True],
    "soft_cap": [None, 1.5],
    "sinks": [False, True],
    "dropout": [0.0, 0.3],
    "scale": [None, 0.7],
}


def pairwise(levels: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Choices such that any two values of any two options occur together in some choice; greedy."""
    values = [(name, i) for name in levels for i in range(len(levels[name]))]
    missing = {frozenset(pair) for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]}
    while missing:
        chosen = sorted(max(missing, key=sorted))
        for name in levels:
            if name not in dict(chosen):
                options = [value for value in values if value[0] == name]
                chosen.append(max(options, key=lambda v, c=chosen: sum(frozenset((v, x)) in missing for x in c)))
        missing = missing - {frozenset(pair) for pair in itertools.combinations(chosen, 2)}
        yield {name: levels[name][i] for name, i in chosen}


def random_case(seed: int, dtype: Any = np.float32, **choice: Any) -> Case:
    """A call with the options of one choice of `LEVELS`; those left out take their first value."""
    rng = np.random.default_rng(seed)
    option = {name: values[0] for name, values in LEVELS.items()} | choice
    B, T, S, N, K, H, Hv = option["sizes"]

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.normal(size=shape), dtype))

    arguments: dict[str, Any] = {
        "query": normal(B, T, N, H),
        "key": normal(B, S, K, H),
        "value": normal(B, S, K, Hv),
        "logits_soft_cap": option["soft_cap"],
        "scale": option["scale"],
    }
    if option["positions"] is not None:
        start = rng.integers(-2, max(S - T, 0) + 1, (B, 1))  # a negative start leaves rows without a key
        arguments |= {"q_positions": start + np.arange(T), "is_causal": "causal" in option["positions"]}
        arguments["window"] = (2, 1) if "window" in option["positions"] else None
    shapes = {"full": (B, N, T, S), "broadcast": (1, N, 1, S)}
    if option["explicit"]:
        arguments["mask"] = rng.random(shapes[option["explicit"]]) > 0.3
    if option["bias"]:
        bias = normal(*shapes[option["bias"]])
        arguments["bias"] = np.where(rng.random(bias.shape) < 0.15, np.asarray(-np.inf, bias.dtype), bias)
    if option["lengths"]:
        arguments |= {"q_lengths": rng.integers(0, T + 1, B), "kv_lengths": rng.integers(1, S + 1, B)}
    if option["segments"]:
        arguments |= {"q_segment_ids": rng.integers(0, 2, (B, T)), "kv_segment_ids": rng.integers(0, 2, (B, S))}
    if option["sinks"]:
        arguments["sinks"] = np.asarray(rng.normal(size=N), np.float64 if dtype == np.float64 else np.float32)
    if option["dropout"]:
        arguments |= {"dropout_rate": option["dropout"], "dropout_key": jax.random.key(seed)}
    return Case(arguments, rng.normal(size=(B, T, N, Hv)), rng.normal(size=(B, T, N)))
