"""Entry points of attention: the call, its statistics, and its plan."""

from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.attention import backends
from flashspec.attention.plan import AttentionPlan, make_plan
from flashspec.attention.request import (
    AttentionOperands,
    AttentionRequest,
    Number,
    check_dtypes,
    make_request,
    partitioned_axes,
    placement_of,
)
from flashspec.attention.settings import AttentionImplementation, split
from flashspec.masks import Positions, Window
from flashspec.online_softmax import SoftmaxStats, check_rows
from flashspec.selection import Target, resolve_device

type Shaped = ArrayLike | jax.ShapeDtypeStruct


def dot_product_attention(
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
    implementation: AttentionImplementation = None,
    return_lse: bool = False,
) -> Any:
    """Exact scaled dot-product attention with grouped heads.

        score = soft_cap(scale * q.k + bias), where the mask allows the pair
        output = sum_j e^(score_j) v_j / sum_j e^(score_j)        (eq. 33.2)

    A key that no query of its row can see touches neither output nor gradients, even when it holds NaN; a query without
    any key has output 0, lse -inf and gradients 0. Differentiable in query, key, value, bias and sinks, through output
    and lse. Batch and heads may be split over devices.

    Args:
      query: [B, T, N, H], bfloat16, float16, float32 or (in 64-bit mode) float64.
      key: [B, S, K, H] in the query's dtype; query head n reads key head n // (N / K).
      value: [B, S, K, Hv].
      bias: [B, N, T, S], any axis may be 1; added to the scaled scores; -inf hides a pair.
      mask: bool, [B, N, T, S], any axis may be 1; True = may attend.
      is_causal: a query sees keys at positions up to its own. With T != S, `q_positions` has to say where queries are.
      q_positions: logical positions of the queries, [T], [B, T] or `Contiguous(start[B])`, any integer dtype.
      kv_positions: logical positions of the keys, [S], [B, S] or `Contiguous`; 0..S-1 by default.
      q_lengths: [B] integers; queries from this index on are empty rows.
      kv_lengths: [B] integers; keys from this index on are hidden.
      q_segment_ids: [B, T] integers; a query sees keys of its own segment only.
      kv_segment_ids: [B, S] integers.
      window: (left, right), the positions besides its own that a query sees on each side; None for no limit.
      scale: a Python number of at most 1e30 in magnitude; 1 / sqrt(H) by default.
      logits_soft_cap: c of c tanh(score / c), a Python number in [1e-30, 1e30].
      sinks: [N] natural-log logits, one more key with value 0 for each head; neither scaled nor capped. In lse too.
      dropout_rate: a Python number in [0, 1], the probability of dropping a weight; the normaliser keeps it.
      dropout_key: a typed key, as from `jax.random.key`.
      dropout_broadcast: names out of ("batch", "head", "query", "key"); one mask is shared along each.
      dropout_offsets: four integers, where this shard's batch, head, query and key indices begin in the whole call.
      empty_rows: "zero", or "error" to refuse a query that has neither a key nor a sink: ValueError where the rows are
        concrete, a `checkify` check where they are traced, for which the caller needs `checkify.checkify`.
      implementation: "hopper", "ampere", "tpu", "cudnn", "blockwise" or "reference"; a sequence of them, of which the
        first that supports the call runs; None for the best one for the platform that the call is lowered for.
        `Hopper(...)` and `Ampere(...)` stand for "hopper" and "ampere" with launch settings of the caller's own, or
        with gradients that are bit-equal from run to run. "ampere" runs on every NVIDIA GPU from compute capability 8.0
        on, and cuDNN comes before it.
      return_lse: whether to return the log-normaliser too.

    Returns:
      output [B, T, N, Hv] in the query's dtype; with `return_lse` also lse [B, T, N] in float32 (float64 for float64).

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call; the message has every reason.
    """
    arguments = dict(locals())  # all of them under their own names, to be checked in one place
    arguments["return_lse"] = checks.flag("return_lse", return_lse) or empty_rows == "error"
    request, operands = _prepare(arguments)
    output, lse = backends.run(request, operands, implementation)
    if empty_rows == "error":
        check_rows(lse != -np.inf, empty_rows)
    return (output, lse) if return_lse else output


def attention_stats(
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
    empty_rows: str = "zero",
    implementation: AttentionImplementation = None,
) -> SoftmaxStats:
    """Statistics of attention over one disjoint part of a larger key set (eq. 33.3), to be merged and finalised.

    `finalize(merge(stats of one part, stats of the other), sinks=sinks)` is attention over both parts.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H], this part of the keys.
      value: [B, S, K, Hv].
      bias: [B, N, T, S], this part of the bias.
      mask: bool, [B, N, T, S].
      kv_positions: [S] or [B, S]; a causal or windowed part has to say where its keys are, unless it is the first.
      empty_rows: "error" refuses a query that sees no key of this part.
      The others are those of `dot_product_attention`.

    Returns:
      m, l, nonempty [B, T, N] and u [B, T, N, Hv], in float32 (float64 for float64).

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call.
    """
    request, operands = _prepare({**locals(), "statistics": True})
    stats = backends.run(request, operands, implementation)
    check_rows(stats.nonempty, empty_rows)
    return stats


def plan_attention(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    bias: Shaped | None = None,
    mask: Shaped | None = None,
    *,
    is_causal: bool = False,
    q_positions: Positions | Shaped = None,
    kv_positions: Positions | Shaped = None,
    q_lengths: Shaped | None = None,
    kv_lengths: Shaped | None = None,
    q_segment_ids: Shaped | None = None,
    kv_segment_ids: Shaped | None = None,
    window: Window = None,
    scale: Number | None = None,
    logits_soft_cap: Number | None = None,
    sinks: Shaped | None = None,
    dropout_rate: Number = 0.0,
    dropout_key: jax.Array | jax.ShapeDtypeStruct | None = None,
    dropout_broadcast: tuple[str, ...] = (),
    dropout_offsets: Shaped | tuple[Shaped, ...] | None = None,
    empty_rows: str = "zero",
    implementation: AttentionImplementation = None,
    return_lse: bool = False,
    device: jax.Device | str | None = None,
) -> AttentionPlan:
    """What `dot_product_attention` would run for these arguments, and why not something else; computes nothing.

    Args:
      query: [B, T, N, H], an array or a `jax.ShapeDtypeStruct`; so are all other arrays.
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      device: a device or the kind of one, such as "NVIDIA H200"; where the query lies by default.
      The others are those of `dot_product_attention`.

    Returns:
      The plan; `print` shows it as a table.

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call.
    """
    arguments = dict(locals())
    given = {name: arguments[name] for name in ("query", "key", "value")}
    check_dtypes(**given)
    target = resolve_device(arguments.pop("device"), query)
    arguments |= _facts_of(target)
    arguments["return_lse"] = checks.flag("return_lse", return_lse) or empty_rows == "error"
    arrays = {name: arguments.pop(name) for name in _ARRAYS}
    arguments |= {"partitioned": partitioned_axes(**arrays), "placement": placement_of(query, key)}
    requests: list[AttentionRequest] = []

    def prepare(arrays: dict[str, Any]) -> AttentionOperands:
        request, operands = _prepare({**arguments, **arrays})
        requests.append(request)
        return operands

    operands = jax.eval_shape(prepare, arrays)
    return make_plan(requests[0], operands, given, implementation, target.kind)


_ARRAYS = (
    *("query", "key", "value", "bias", "mask", "q_positions", "kv_positions", "q_lengths", "kv_lengths"),
    *("q_segment_ids", "kv_segment_ids", "sinks", "dropout_key", "dropout_offsets"),
)


def _prepare(arguments: dict[str, Any]) -> tuple[AttentionRequest, AttentionOperands]:
    """Check the arguments of a call together with where its operands lie; of `implementation` the settings alone."""
    facts = {name: argument for name, argument in arguments.items() if name != "implementation"}
    _, facts["settings"] = split(arguments["implementation"])
    if "partitioned" not in facts:
        facts["partitioned"] = partitioned_axes(**{name: facts[name] for name in _ARRAYS if name in facts})
        facts["placement"] = placement_of(facts["query"], facts["key"])
    if "platform" not in facts:
        facts |= _facts_of(resolve_device(None, facts["query"]))
    return make_request(**facts)


def _facts_of(target: Target) -> dict[str, str | None]:
    return {
        "platform": target.platform,
        "compute_capability": target.compute_capability,
        "device_kind": target.kind,
    }
