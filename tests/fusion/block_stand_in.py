"""A stand-in for the Hopper kernel of a decoder step, in jax, which writes to the cache by reference as it does."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from flashspec.fusion import backends, decode_block, decode_block_hopper, decode_layers
from pallas_kernels.gpu.hopper.decode_block_config import (
    ADDING,
    PRODUCTS,
    BlockOperands,
    BlockPlan,
    beginning,
    refusals,
)
from pallas_kernels.gpu.hopper.decode_block_letters_config import letters_of
from pallas_kernels.gpu.hopper.decode_block_program import Buffers

SEEN: list[BlockPlan] = []


def kernel(plan: BlockPlan, ops: BlockOperands) -> Buffers:
    """What the kernel computes, phase by phase, in float32 and rounded where it rounds."""
    check(plan, ops)
    SEEN.append(plan)
    rows, offset, adds = plan.shape.rows, float(plan.unit_offset), bool(set(ADDING) & set(plan.phases))
    begin, first, scales = ops.begin, 0 if ops.first is None else ops.first[0], ops.scales or {}
    # Words that another call has left say that rows are there which are not.
    by = jnp.where(jnp.all(ops.counts[...] == first), 1.0, jnp.nan).astype(jnp.float32)
    ops.counts[...] = jnp.broadcast_to(first + plan.layers, ops.counts.shape)
    x, query = ops.x, None
    if begin is not None:
        x, by = begin.rows[:rows], by * factor(plan, squares_of(plan, ops, first + 1), plan.shape.hidden)
    residual = wide((ops if begin is None else begin).residual[:rows]) if adds else jnp.zeros(())
    for layer, (number, name) in itertools.product(range(plan.layers), enumerate(plan.phases)):
        if name == "attend":
            assert query is not None
            x = attended(plan, ops, query, ops.caches[layer])
        if name not in PRODUCTS:  # all that merging does is done
            continue
        y = by * jnp.dot(wide(x), wide(ops.weights[number][layer]), precision="highest")
        by = jnp.ones((), jnp.float32)
        if name == "gate_up":
            gate, up = jnp.split(y, 2, axis=-1)
            x = rounded(plan.activation(gate) * up)
        elif name == "qkv":
            query = heads(plan, ops, y, first + layer, ops.caches[layer])
        else:
            residual = rounded(residual + y)
            if name in scales:
                x = rounded(residual * (wide(scales[name][first + layer])[None] + offset))
                by = factor(plan, residual**2, plan.shape.hidden)
    padding = ((0, plan.row_groups * 4 - rows), (0, 0))
    after = jnp.pad(residual.astype(jnp.bfloat16), padding, constant_values=np.nan) if adds else None
    if begin is None:
        return Buffers({}, after, query)
    begin.residual[...] = after
    begin.rows[:rows] = x.astype(jnp.bfloat16)
    sent = lax.bitcast_convert_type((residual**2).reshape(rows, -1, 128).sum(-1), jnp.int32).ravel()
    turn = jnp.broadcast_to(first + plan.layers + 1, sent.shape)
    ops.letters[: sent.size] = jnp.stack([sent, turn], axis=1)
    return Buffers({}, None, query)


def squares_of(plan: BlockPlan, ops: BlockOperands, turn: Any) -> Array:
    """What a step with attention has sent of its residual; NaN where it is not of the turn."""
    box = letters_of(plan).squares["down"]
    number, sent = (ops.letters[box.begin : box.begin + math.prod(box.shape), which] for which in range(2))
    squares = jnp.where(sent == turn, lax.bitcast_convert_type(number, jnp.float32), jnp.nan)
    return squares.reshape(box.shape)


def check(plan: BlockPlan, ops: BlockOperands) -> None:
    """That the operands are those which the plan asks for."""
    shape, attends, makes = plan.shape, plan.attention is not None, "qkv" in plan.phases
    products = tuple(name for name in PRODUCTS if name in plan.phases)
    assert not refusals(shape, plan.config, "bfloat16", products, plan.attention)
    for name, matrices in zip(plan.phases, ops.weights, strict=True):
        assert [x.shape for x in matrices] == ([shape.matrix(name)] * plan.layers if name in products else [])
        assert all(x.dtype == jnp.bfloat16 for x in matrices)
    followed = {name for name in ADDING if name in (plan.phases if attends else plan.phases[:-1])}
    assert (ops.scales or {}).keys() == followed
    assert (ops.bias is not None) == (makes and plan.biased)
    assert len(ops.head_scales) == 2 * (makes and plan.head_norms)
    assert len(ops.caches) == makes * plan.layers
    assert (ops.letters.shape, ops.letters.dtype) == ((letters_of(plan).total, 2), jnp.int32)
    assert (ops.x is None) == (ops.begin is not None) == (ops.first is not None) == (ops.lengths is not None) == attends
    if attends:
        assert (ops.lengths.shape, ops.lengths.dtype) == ((2, plan.query[0]), jnp.int32)
        assert [x.shape for x in ops.begin] == [x.shape for x in beginning(plan, jnp.bfloat16)]
    else:
        assert ops.x.shape == (shape.rows, shape.matrix(plan.phases[0])[0])


def wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def rounded(x: Array) -> Array:
    return wide(x.astype(jnp.bfloat16))


def factor(plan: BlockPlan, squares: Array, size: int) -> Array:
    return lax.rsqrt(jnp.sum(squares, axis=-1, keepdims=True) / size + plan.eps)


def attended(plan: BlockPlan, ops: BlockOperands, query: Array, cache: tuple[Any, Any]) -> Array:
    """Rows [rows, K G H] of causal attention over a layer of the cache, by packed queries."""
    (K, G, H), (B, *_), T = plan.shape.heads, plan.query, plan.tokens
    assert plan.attention is not None
    held, length = (x.reshape(B, 1, 1) for x in ops.lengths)
    at, token = jnp.arange(plan.attention.slots).reshape(1, 1, -1), jnp.arange(T).reshape(1, T, 1)
    seen = ((at <= held + token) & (at < length))[:, None, :, None]  # [B, 1, T, 1, slots]
    key, value = (wide(ref[:B]) for ref in cache)
    value = jnp.where((at < length).reshape(B, -1, 1, 1), value, 0.0)
    packed = wide(query[:, :, : T * G].reshape(B, K, T, G, H))
    scores = jnp.einsum("bktgh,bskh->bktgs", packed, key, precision="highest") * plan.attention.scale
    scores = jnp.where(seen, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0.0, highest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    out = jnp.einsum("bktgs,bskh->btkgh", weights, value, precision="highest")
    return rounded(out).reshape(B * T, K * G * H)


def heads(plan: BlockPlan, ops: BlockOperands, y: Array, turn: Any, cache: tuple[Any, Any]) -> Array:
    """Write keys and values of a product `qkv`, and pack its queries."""
    (K, G, H), (B, _, packed, _), rows, T = plan.shape.heads, plan.query, plan.shape.rows, plan.tokens
    if plan.biased:
        y = rounded(y) + wide(ops.bias[turn])[None]
    y = y.reshape(rows, K, G + 2, H)
    turned = rounded(y[:, :, : G + 1])
    if plan.head_norms:

        def scaled(x: Array, scale: Array) -> Array:
            x = x * factor(plan, x * x, H)
            x = x if plan.unit_offset else rounded(x)
            return rounded(x * (wide(scale[turn]) + float(plan.unit_offset)).reshape(1, 1, 1, H))

        parts = turned[:, :, :G], turned[:, :, G:]
        turned = jnp.concatenate([scaled(*each) for each in zip(parts, ops.head_scales, strict=True)], axis=2)
    first, second = jnp.split(turned, 2, axis=-1)
    cos, sin = (x[:, None, None, :] for x in (ops.places.cos, ops.places.sin))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(jnp.bfloat16)
    for ref, new in zip(cache, (turned[:, :, G], y[:, :, G + 1].astype(jnp.bfloat16)), strict=True):
        places = ops.places.lead, ops.places.slot
        ref[...] = ref[...].at[places].set(new, mode="drop", wrap_negative_indices=False)
    query = turned[:, :, :G].reshape(B, T, K, G, H).swapaxes(1, 2).reshape(B, K, T * G, H)
    return jnp.pad(query, ((0, 0), (0, 0), (0, packed - T * G), (0, 0)), constant_values=np.nan)


def use(
    monkeypatch: pytest.MonkeyPatch,
    stand_in: Any = kernel,
    adaptor: Any = decode_block_hopper,
    whole_layers: bool = True,
) -> None:
    """Let "hopper" be the stand-in, on a chip of one multiprocessor; with attention within only where asked."""

    def refuse(request: Any, attention: Any = None) -> tuple[str, ...]:
        if attention is not None and not whole_layers:
            return ("has no attention within in this test",)
        return adaptor.what_it_takes(request, 1, attention)

    monkeypatch.setattr(adaptor, "multiprocessors", lambda kind: 1)
    monkeypatch.setattr(adaptor, "refusals", refuse)
    monkeypatch.setattr(backends, "decode_block_kernel", lambda: stand_in)
    for module in (decode_block, decode_layers):
        monkeypatch.setattr(module, "decode_block_hopper", adaptor)
    monkeypatch.setitem(decode_block._REFUSALS, "hopper", refuse)
    for cached in (decode_block._execute, adaptor._launch):
        cached.clear_cache()
    SEEN.clear()
