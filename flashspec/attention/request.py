"""The facts of one attention call: what is static about it, and its operands checked and in one form.

`make_request` is where every caller's mistake is found, for all backends at once and before any of them is asked.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.attention.dropout import AXES, Dropout, make_dropout
from flashspec.checks import fail
from flashspec.masks import Mask, Positions, Window, make_mask
from flashspec.online_softmax import stats_dtype

type Number = ArrayLike  # of no dimensions and static: a traced array is refused by the argument's name

DTYPES = (jnp.bfloat16, np.float16, np.float32, np.float64)


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """What is known of a call without looking at a value: hashable, and all that `supports` may read.

    Args:
      B, T, S, N, K, H, Hv: sizes (see `flashspec.dims`).
      dtype: of query, key, value and output.
      scale: multiplies q.k.
      is_causal, window: the static part of the mask.
      logits_soft_cap: c of c * tanh(score / c), or None.
      dropout_rate: probability of dropping.
      dropout_broadcast: axes that share one dropout mask.
      options: names of the optional array arguments in use, such as "bias" or "q_positions".
      return_lse: whether the log-normaliser is asked for.
      statistics: whether (m, l, u) is asked for in place of an output.
      platform: "cpu", "cuda", "rocm" or "tpu".
      partitioned: operand axes that are split over devices and may not be.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    dtype: np.dtype
    scale: float
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    dropout_broadcast: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()
    return_lse: bool = False
    statistics: bool = False
    platform: str = "cpu"
    partitioned: tuple[str, ...] = ()

    @property
    def G(self) -> int:
        """Query heads per key/value head."""
        return self.N // self.K

    @property
    def stats_dtype(self) -> np.dtype:
        """dtype of scores, statistics and lse."""
        return stats_dtype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOperands:
    """The arrays of a call; an option that is not used is None."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, Hv]
    bias: jax.Array | None  # [B|1, N|1, T|1, S|1], in its own floating dtype
    mask: Mask
    sinks: jax.Array | None  # [N], in the dtype of the statistics
    dropout: Dropout | None  # None at rate 0


def make_request(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    q_positions: Positions = None,
    kv_positions: Positions = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    window: Window = None,
    scale: Number | None = None,
    logits_soft_cap: Number | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: Number = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_broadcast: tuple[str, ...] = (),
    dropout_offsets: ArrayLike | tuple[ArrayLike, ...] | None = None,
    empty_rows: str = "zero",
    return_lse: bool = False,
    statistics: bool = False,
    platform: str = "cpu",
    partitioned: tuple[str, ...] = (),
) -> tuple[AttentionRequest, AttentionOperands]:
    """Check the arguments of `dot_product_attention` and bring them into the form that backends take.

    Args:
      query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv].
      statistics, platform, partitioned: as in `AttentionRequest`.
      The others are those of `dot_product_attention`.

    Returns:
      The request and its operands.

    Raises:
      ValueError: an argument is wrong; the message names it.
    """
    checks.one_of("empty_rows", empty_rows, ("zero", "error"))
    check_dtypes(query=query, key=key, value=value)
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    sizes = checks.shape("query", query, "B T N H")
    sizes = checks.shape("key", key, "B S K H", sizes)
    sizes = checks.shape("value", value, "B S K Hv", sizes)
    for name in ("N", "K", "H", "Hv"):
        checks.at_least(name, sizes[name], 1)
    if sizes["N"] % sizes["K"]:
        raise fail("query", f"a number of heads N that is a multiple of K = {sizes['K']}", f"N = {sizes['N']}")
    scores = (sizes["B"], sizes["N"], sizes["T"], sizes["S"])
    rate = _number("dropout_rate", dropout_rate, low=0.0, high=1.0)
    arrays = {
        "bias": bias,
        "mask": mask,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "q_lengths": q_lengths,
        "kv_lengths": kv_lengths,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "sinks": sinks,
    }
    structure = make_mask(
        scores,
        mask,
        is_causal=is_causal,
        window=window,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
    )
    request = AttentionRequest(
        **sizes,
        dtype=query.dtype,
        scale=1 / math.sqrt(sizes["H"]) if scale is None else _number("scale", scale),
        is_causal=structure.is_causal,
        window=structure.window,
        logits_soft_cap=None if logits_soft_cap is None else _number("logits_soft_cap", logits_soft_cap, above=0.0),
        dropout_rate=rate,
        dropout_broadcast=_axes("dropout_broadcast", dropout_broadcast),
        options=frozenset(name for name, array in arrays.items() if array is not None),
        return_lse=return_lse,
        statistics=statistics,
        platform=platform,
        partitioned=partitioned,
    )
    operands = AttentionOperands(
        query=query,
        key=key,
        value=value,
        bias=_bias(bias, scores),
        mask=structure,
        sinks=_sinks(sinks, sizes["N"], request.stats_dtype),
        dropout=_dropout(dropout_key, rate, request.dropout_broadcast, dropout_offsets),
    )
    return request, operands


def partitioned_axes(**operands: Any) -> tuple[str, ...]:
    """Which axes of the operands are split over devices, other than batch and heads: "key axis 1" for S.

    Args:
      operands: query, key, value [B, T or S, heads, size], bias and mask [B, N, T, S], by name; None is skipped.
        Sharding is seen on concrete arrays, on `ShapeDtypeStruct`s that carry one, and on tracers of meshes in
        explicit mode; inside a `jit` in automatic mode no operand has one.
    """
    allowed = {"query": (0, 2), "key": (0, 2), "value": (0, 2), "bias": (0, 1), "mask": (0, 1)}
    found = []
    for name, operand in operands.items():
        split = _split_axes(operand)
        found += [f"{name} axis {axis}" for axis in split if axis not in allowed[name]]
    return tuple(found)


def _split_axes(operand: Any) -> list[int]:
    if isinstance(operand, jax.core.Tracer):
        sharding = jax.typeof(operand).sharding
    else:
        sharding = getattr(operand, "sharding", None)
    if sharding is None:
        return []
    if not isinstance(sharding, NamedSharding):
        return [axis for axis, size in enumerate(sharding.shard_shape(operand.shape)) if size != operand.shape[axis]]
    names = [(entry,) if isinstance(entry, str) else entry for entry in sharding.spec]
    return [
        axis for axis, entry in enumerate(names) if math.prod(sharding.mesh.shape[name] for name in entry or ()) > 1
    ]


def check_dtypes(**arrays: Any) -> None:
    """Check that query, key and value, given by name, share one dtype in which attention is computed."""
    given = {name: np.dtype(getattr(array, "dtype", np.float32)) for name, array in arrays.items()}
    first = next(iter(given.values()))
    for name, dtype in given.items():
        if dtype not in DTYPES:
            raise fail(name, "dtype " + ", ".join(np.dtype(dtype).name for dtype in DTYPES), dtype)
        if dtype == np.float64 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise fail(name, "float32 or narrower unless jax_enable_x64 is set", dtype)
        if dtype != first:
            raise fail(name, f"the query's dtype {first}", dtype)


def _number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, above: float | None = None
) -> float:
    """Check a static number: a Python or numpy scalar, since the compiled program holds it as a constant."""
    expected = f"a number above {above}" if above is not None else f"a number in [{low}, {high}]"
    if isinstance(value, jax.core.Tracer):
        raise fail(name, f"a Python number, static under jit ({expected})", "a traced array")
    if isinstance(value, bool) or np.ndim(value) != 0 or not np.issubdtype(np.result_type(value), np.number):
        raise fail(name, expected, repr(value))
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high or (above is not None and number <= above):
        raise fail(name, expected, repr(value))
    return number


def _axes(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(axes, str) or any(axis not in AXES for axis in axes):
        raise fail(name, f"a tuple of names out of {AXES}", repr(axes))
    return tuple(axis for axis in AXES if axis in axes)


def _bias(bias: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array | None:
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    checks.floating("bias", bias)
    if bias.ndim != 4 or any(got not in (1, want) for got, want in zip(bias.shape, shape, strict=True)):
        raise fail("bias", f"rank 4, broadcastable to [B, N, T, S] = {list(shape)}", f"shape {list(bias.shape)}")
    return bias


def _sinks(sinks: ArrayLike | None, heads: int, dtype: np.dtype) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    checks.floating("sinks", sinks)
    checks.shape("sinks", sinks, "N", {"N": heads})
    return sinks.astype(dtype)


def _dropout(
    key: jax.Array | None,
    rate: float,
    broadcast: tuple[str, ...],
    offsets: ArrayLike | tuple[ArrayLike, ...] | None,
) -> Dropout | None:
    if rate == 0:
        return None
    if key is None or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        got = None if key is None else f"dtype {key.dtype}, shape {list(key.shape)}"
        raise fail("dropout_key", "one typed key, as from `jax.random.key`, because dropout_rate > 0", got)
    offsets = jnp.stack([jnp.asarray(x) for x in offsets]) if isinstance(offsets, tuple) else offsets
    offsets = jnp.zeros(4, jnp.int32) if offsets is None else jnp.asarray(offsets)
    checks.integer("dropout_offsets", offsets)
    checks.shape("dropout_offsets", offsets, "4")
    return make_dropout(key, rate, broadcast, offsets)
