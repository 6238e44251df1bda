"""A stand-in for the Hopper kernel of a decoder step, in jax, which writes to the cache by reference as it does."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from flashspec.fusion import backends, decode_block, decode_block_hopper
from pallas_kernels.gpu.hopper.decode_block_config import BlockOperands, BlockPlan, refusals

SEEN: list[BlockPlan] = []


class Written(NamedTuple):
    residual: Array | None
    query: Array | None


def kernel(plan: BlockPlan, ops: BlockOperands) -> Written:
    """What the kernel computes, in float32 and rounded where it rounds."""
    assert not refusals(plan.shape, plan.config, ops.x.dtype.name, plan.products)
    SEEN.append(plan)
    (K, G, H), rows, dtype = plan.shape.heads, plan.shape.rows, ops.x.dtype
    weights = dict(zip(plan.products, ops.weights, strict=True))
    for name, matrix in weights.items():
        assert matrix.shape == plan.shape.matrix(name)

    def dot(x: Array, w: Array) -> Array:
        return jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    def scaled(x: Array, scale: Array) -> Array:
        x = x if plan.unit_offset else rounded(x)
        return rounded(x * (scale.astype(jnp.float32) + float(plan.unit_offset)))

    def factor(x: Array) -> Array:
        return lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + plan.eps)

    residual, x, by = None, ops.x, jnp.ones((), jnp.float32)
    if "out" in weights:
        residual = rounded(ops.residual[:rows].astype(jnp.float32) + dot(x, weights["out"]))
        offset = float(plan.unit_offset)
        gate, up = jnp.split(
            factor(residual)
            * dot(rounded(residual * (ops.scales[0].astype(jnp.float32)[None] + offset)), weights["gate_up"]),
            2,
            axis=-1,
        )
        residual = rounded(residual + dot(rounded(plan.activation(gate) * up), weights["down"]))
        by = factor(residual)
        if "qkv" in weights:
            x = rounded(residual * (ops.scales[1].astype(jnp.float32)[None] + offset))
        residual = jnp.pad(residual.astype(dtype), ((0, plan.row_groups * 4 - rows), (0, 0)), constant_values=np.nan)
    if "qkv" not in weights:
        return Written(residual, None)
    y = by * dot(x, weights["qkv"])
    if plan.biased:
        y = rounded(y) + ops.bias.astype(jnp.float32)[None]
    y = y.reshape(rows, K, G + 2, H)
    turned = rounded(y[:, :, : G + 1])
    if plan.head_norms:
        parts = [turned[:, :, :G], turned[:, :, G:]]
        norms = [scaled(x * factor(x), s.reshape(1, 1, 1, H)) for x, s in zip(parts, ops.head_scales, strict=True)]
        turned = jnp.concatenate(norms, axis=2)
    first, second = jnp.split(turned, 2, axis=-1)
    cos, sin = (x[:, None, None, :] for x in (ops.places.cos, ops.places.sin))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(dtype)
    for ref, new in ((ops.key, turned[:, :, G]), (ops.value, y[:, :, G + 1].astype(dtype))):
        ref[...] = ref[...].at[ops.places.lead, ops.places.slot].set(new, mode="drop", wrap_negative_indices=False)
    return Written(residual, turned[:, :, :G].reshape(rows, K * G, H))


def use(monkeypatch: pytest.MonkeyPatch, stand_in: Any = kernel, adaptor: Any = decode_block_hopper) -> None:
    """Let "hopper" be the stand-in, on a chip of one multiprocessor."""
    monkeypatch.setattr(decode_block_hopper, "multiprocessors", lambda kind: 1)
    monkeypatch.setattr(adaptor, "multiprocessors", lambda kind: 1)
    monkeypatch.setattr(backends, "decode_block_kernel", lambda: stand_in)
    monkeypatch.setattr(decode_block, "decode_block_hopper", adaptor)
    monkeypatch.setitem(decode_block._REFUSALS, "hopper", lambda request: adaptor.what_it_takes(request, 1))
    decode_block._execute.clear_cache()
    SEEN.clear()
