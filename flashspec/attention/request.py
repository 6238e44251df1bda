"""The facts of one attention call: what is static about it, and its operands checked and in one form.

`make_request` is where every caller's mistake is found, for all backends at once and before any of them is asked.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.attention.dropout import AXES, Dropout, make_dropout
from flashspec.attention.settings import Settings
from flashspec.checks import fail
from flashspec.masks import Mask, Positions, Window, make_mask
from flashspec.online_softmax import stats_dtype
from flashspec.selection import Placement, placement, shards, split_axes

type Number = ArrayLike  # of no dimensions and static: a traced array is refused by the argument's name

# Outside of these, the product of a scale or a soft cap with a score leaves the range of float32.
LARGEST, SMALLEST_CAP = 1e30, 1e-30
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
      options: names of the optional array arguments in use, such as "bias" or "q_positions"; and "position_array" where
        positions are an array rather than `Contiguous`.
      return_lse: whether the log-normaliser is asked for.
      statistics: whether (m, l, u) is asked for in place of an output.
      platform: "cpu", "cuda", "rocm" or "tpu".
      compute_capability: of a CUDA GPU, such as "9.0"; None elsewhere and where it is not known.
      device_kind: such as "NVIDIA H200", whose tuned settings and facts are used; None where it is not known.
      settings: launch settings that the caller gave, at most one of each kind.
      partitioned: operand axes that are split over devices and may not be.
      head_shards: into how many parts devices split the query heads, where that is visible.
      placement: of query and key, [B, T or S, heads, H], on a mesh of several devices; None for one device.
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
    compute_capability: str | None = None
    device_kind: str | None = None
    settings: tuple[Settings, ...] = ()
    partitioned: tuple[str, ...] = ()
    head_shards: int = 1
    placement: Placement | None = None

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
    compute_capability: str | None = None,
    device_kind: str | None = None,
    settings: tuple[Settings, ...] = (),
    partitioned: tuple[str, ...] = (),
    placement: Placement | None = None,
) -> tuple[AttentionRequest, AttentionOperands]:
    """Check the arguments of `dot_product_attention` and bring them into the form that backends take.

    Args:
      query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv].
      statistics, platform, compute_capability, device_kind, settings, partitioned, placement: as in
        `AttentionRequest`.
      The others are those of `dot_product_attention`.

    Returns:
      The request and its operands.

    Raises:
      ValueError: an argument is wrong; the message names it.
    """
    checks.one_of("empty_rows", empty_rows, ("zero", "error"))
    check_dtypes(query=query, key=key, value=value)
    query, key, value = (checks.array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    sizes = checks.shape("query", query, "B T N H")
    sizes = checks.shape("key", key, "B S K H", sizes)
    sizes = checks.shape("value", value, "B S K Hv", sizes)
    for name in ("N", "K", "H", "Hv"):
        checks.at_least(name, sizes[name], 1)
    if sizes["N"] % sizes["K"]:
        raise fail("query", f"a number of heads N that is a multiple of K = {sizes['K']}", f"N = {sizes['N']}")
    scores = (sizes["B"], sizes["N"], sizes["T"], sizes["S"])
    rate = _number("dropout_rate", dropout_rate, 0.0, 1.0)
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
        scale=1 / math.sqrt(sizes["H"]) if scale is None else _number("scale", scale, -LARGEST, LARGEST),
        is_causal=structure.is_causal,
        window=structure.window,
        logits_soft_cap=(
            None if logits_soft_cap is None else _number("logits_soft_cap", logits_soft_cap, SMALLEST_CAP, LARGEST)
        ),
        dropout_rate=rate,
        dropout_broadcast=_axes("dropout_broadcast", dropout_broadcast),
        options=frozenset(name for name, array in arrays.items() if array is not None) | _position_array(structure),
        return_lse=checks.flag("return_lse", return_lse),
        statistics=statistics,
        platform=platform,
        compute_capability=compute_capability,
        device_kind=device_kind,
        settings=settings,
        partitioned=partitioned,
        head_shards=shards(query, 2) if placement is None else placement.parts(2),
        placement=placement,
    )
    operands = AttentionOperands(
        query=query,
        key=key,
        value=value,
        bias=_bias(bias, scores, request.stats_dtype),
        mask=structure,
        sinks=_sinks(sinks, sizes["N"], request.stats_dtype),
        dropout=_dropout(dropout_key, rate, request.dropout_broadcast, dropout_offsets),
    )
    return request, operands


# Axes, counted from the end, that a call needs whole on every device: all but batch and heads.
_WHOLE_AXES = {
    **dict.fromkeys(("query", "key", "value"), (-3, -1)),  # [B, T or S, heads, size]
    **dict.fromkeys(("bias", "mask"), (-2, -1)),  # [B, N, T, S]
    **dict.fromkeys(("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids", "page_table"), (-1,)),
    **dict.fromkeys(("key_pages", "value_pages"), (-4, -3, -1)),  # [pages, page, heads, size]
}


def partitioned_axes(**operands: Any) -> tuple[str, ...]:
    """Which axes of the operands are split over devices, other than batch and heads: "key axis 1" for S.

    Args:
      operands: arrays of a call or of a view by name; None is skipped, and so are names without such an axis.
        What of their sharding is visible, `flashspec.selection.shards` says.
    """
    return tuple(
        f"{name} axis {axis}"
        for name, operand in operands.items()
        for axis in split_axes(operand)
        if axis - len(operand.shape) in _WHOLE_AXES.get(name, ())
    )


def placement_of(query: Any, key: Any) -> Placement | None:
    """Where a call lies: like its query, or like its key where devices split only that."""
    found = [one for one in (placement(query), placement(key)) if one is not None]
    split = (one for one in found if one.spec is None or any(one.spec[:3:2]))
    return next(split, found[0] if found else None)


def check_dtypes(**arrays: Any) -> None:
    """Check that query, key and value, given by name, share one dtype in which attention is computed."""
    first = None
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None:
            raise fail(name, "an array", type(array).__name__)
        if dtype not in DTYPES:
            raise fail(name, "dtype " + ", ".join(np.dtype(dtype).name for dtype in DTYPES), dtype)
        if dtype == np.float64 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise fail(name, "float32 or narrower unless jax_enable_x64 is set", dtype)
        first = first or dtype
        if dtype != first:
            raise fail(name, f"the query's dtype {first}", dtype)


def _position_array(structure: Mask) -> frozenset[str]:
    positions = (structure.q_positions, structure.kv_positions)
    return frozenset({"position_array"} if any(isinstance(x, jax.Array) for x in positions) else ())


def _number(name: str, value: Any, low: float, high: float) -> float:
    """Check a static number: a Python or numpy scalar, since the compiled program holds it as a constant."""
    expected = f"a number in [{low}, {high}]"
    if isinstance(value, jax.core.Tracer):
        raise fail(name, f"a Python number, static under jit ({expected})", "a traced array")
    dtype = np.asarray(value).dtype
    real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if np.ndim(value) != 0 or not real or not low <= float(value) <= high:
        raise fail(name, expected, repr(value))
    return float(value)


def _axes(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(axes, tuple | list) or any(axis not in AXES for axis in axes):
        raise fail(name, f"a tuple of names out of {AXES}", repr(axes))
    return tuple(axis for axis in AXES if axis in axes)


def _bias(bias: ArrayLike | None, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array | None:
    if bias is None:
        return None
    bias = checks.array("bias", bias)
    checks.floating("bias", bias)
    checks.broadcastable("bias", bias, "B N T S", shape)
    if bias.dtype.itemsize > dtype.itemsize:  # a large finite bias is no mask: it may not round to -inf
        limits = np.finfo(dtype)
        bias = jnp.where(jnp.isinf(bias), bias, jnp.clip(bias, float(limits.min), float(limits.max)))
    return bias


def _sinks(sinks: ArrayLike | None, heads: int, dtype: np.dtype) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = checks.array("sinks", sinks)
    checks.floating("sinks", sinks)
    checks.shape("sinks", sinks, "N", {"N": heads})
    return sinks.astype(dtype)


def _dropout(
    key: jax.Array | None,
    rate: float,
    broadcast: tuple[str, ...],
    offsets: ArrayLike | tuple[ArrayLike, ...] | None,
) -> Dropout | None:
    if isinstance(offsets, tuple | list) and len(offsets) == 4:
        parts = [checks.array("dropout_offsets", offset) for offset in offsets]
        for part in parts:
            checks.integer("dropout_offsets", part)
        offsets = jnp.stack([part.astype(jnp.int32) for part in parts])
    offsets = checks.array("dropout_offsets", np.zeros(4, np.int32) if offsets is None else offsets)
    checks.shape("dropout_offsets", offsets, "4")
    checks.integer("dropout_offsets", offsets)
    if rate == 0:
        return None
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        got = f"dtype {key.dtype}, shape {list(key.shape)}" if isinstance(key, jax.Array) else repr(key)
        raise fail("dropout_key", "one typed key, as from `jax.random.key`, because dropout_rate > 0", got)
    return make_dropout(key, rate, broadcast, offsets)
