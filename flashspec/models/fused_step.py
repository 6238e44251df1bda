"""`Decoder.step` with all that lies between two attentions as one operation, `flashspec.fusion.decode_block`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.cache import Cache
from flashspec.cache.operations import advance, view
from flashspec.checks import fail
from flashspec.fusion.decode_block import (
    MAX_ROWS,
    BlockForm,
    Heads,
    HeadWeights,
    MlpWeights,
    Places,
    decode_block,
    start,
)
from flashspec.models.config import DecoderConfig
from flashspec.models.decoder import Block, Decoder
from flashspec.models.rotary import frequencies, rotary_angles
from flashspec.selection import Implementation

__all__ = ["MAX_ROWS", "fused_step", "refusals"]


def refusals(config: DecoderConfig) -> tuple[str, ...]:
    """Why a decoder has no fused step, whatever computes it; empty when it has one."""
    if config.traits.post_norms:
        return (f"the family {config.family} normalises what each branch adds to the residual stream",)
    return ()


def fused_step(
    decoder: Decoder,
    tokens: Array,
    cache: Cache,
    *,
    attention: Callable[..., Array],
    num_valid: Array | None = None,
    implementation: Implementation = None,
) -> tuple[Array, Cache]:
    """`Decoder.step` for at most `MAX_ROWS` tokens in all; equal to it but for rounding.

    Args:
      decoder: of a family that `refusals` has nothing against.
      tokens: [B,T], integers, B T <= `MAX_ROWS`.
      cache: of the decoder's dtype.
      attention: as in `Decoder.step`.
      num_valid: [B], the first so many tokens of each row are real; None for all.
      implementation: of `decode_block`.

    Returns:
      (hidden [B,T,hidden], normalised; the cache with `length` advanced by `num_valid` or T).

    Raises:
      ValueError: too many tokens.
      NotImplementedError: `implementation` cannot run it; the message has every reason.
    """
    config = decoder.config
    B, T = tokens.shape
    if B * T > MAX_ROWS:
        raise fail("tokens", f"at most {MAX_ROWS} in all rows together", f"shape {[B, T]}")
    heads = Heads(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    form = BlockForm(heads, config.rms_norm_eps, config.traits.unit_offset, config.traits.activation)
    positions = cache.length[:, None] + jnp.arange(T, dtype=cache.length.dtype)[None, :]
    cache, index = advance(cache, T, num_valid)
    places = {rotation: _places(config, rotation, positions, index) for rotation in dict.fromkeys(config.rotations)}
    keys, values = list(cache.key), list(cache.value)
    stream, attended, mlp = start(decoder.embed_few(tokens).reshape(B * T, -1)), None, None
    between = functools.partial(decode_block, form=form, implementation=implementation)
    for layer, (block, rotation) in enumerate(zip(decoder.layers, config.rotations, strict=True)):
        held = keys[layer], values[layer]
        stream, query, *written = between(stream, attended, mlp, _heads(block), places[rotation], held)
        keys[layer], values[layer] = written  # type: ignore[assignment]
        cache = dataclasses.replace(cache, key=tuple(keys), value=tuple(values))
        assert query is not None
        by_row = query.reshape(B, T, config.num_heads, config.head_dim)
        options = decoder.attention_options(layer)
        attended = attention(by_row, view(cache, layer), q_lengths=num_valid, **options).reshape(B * T, -1)
        mlp = MlpWeights(block.out[...], block.mlp_norm.scale[...], block.gate_up[...], block.down[...])
    stream, *_ = between(stream, attended, mlp, None, None, None)
    return decoder.norm(stream.residual[: B * T].reshape(B, T, -1)), cache


def _heads(block: Block) -> HeadWeights:
    """What makes queries, keys and values of a layer."""
    traits, optional = block.config.traits, {}
    if traits.qkv_bias:
        optional["bias"] = block.qkv_bias[...]
    if traits.qk_norm:
        optional |= {"query_norm": block.q_norm.scale[...], "key_norm": block.k_norm.scale[...]}
    return HeadWeights(block.attention_norm.scale[...], block.qkv[...], **optional)


def _places(config: DecoderConfig, rotation: Any, positions: Array, index: tuple[Array, Array]) -> Places:
    """Where the tokens of a step go, and how a layer turns them; computed once, whatever the layers."""
    cos, sin = rotary_angles(positions, frequencies(config.head_dim, *rotation))
    rows = positions.size
    lead, slot = (x.reshape(rows) for x in index)
    angles = (x.reshape(rows, config.head_dim // 2) for x in (cos, sin))
    # The barrier keeps the compiler from computing them in every layer again.
    return Places(*jax.lax.optimization_barrier((lead, slot, *angles)))
