"""`Decoder.step` by few launches: whole layers with their attention, or all that lies between two attentions.

The first is `flashspec.fusion.decode_layers`, for dense caches and plain causal attention on a Hopper GPU; the second
`flashspec.fusion.decode_block`, whatever attends.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.attention.decode import cached_attention
from flashspec.attention.views import DenseView, View
from flashspec.cache import Cache, DenseCache
from flashspec.cache.operations import advance, view
from flashspec.checks import fail
from flashspec.fusion.decode_block import (
    IMPLEMENTATIONS,
    MAX_ROWS,
    BlockForm,
    Heads,
    HeadWeights,
    MlpWeights,
    Places,
    decode_block,
    start,
)
from flashspec.fusion.decode_block_request import LayersArrays, LayerWeights, make_layers_request
from flashspec.fusion.decode_layers import decode_layers
from flashspec.fusion.decode_layers import refusals as layers_refusals
from flashspec.models.config import DecoderConfig
from flashspec.models.decoder import Block, Decoder
from flashspec.models.rotary import frequencies, rotary_angles
from flashspec.selection import Implementation, Target, named, resolve_device, run_where_lowered

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
    form = block_form(config)
    positions = cache.length[:, None] + jnp.arange(T, dtype=cache.length.dtype)[None, :]
    after, index = advance(cache, T, num_valid)
    places = {rotation: _places(config, rotation, positions, index) for rotation in dict.fromkeys(config.rotations)}
    arrays = LayersArrays(
        decoder.embed_few(tokens).reshape(B * T, -1),
        tuple(LayerWeights(_heads(block), _mlp(block)) for block in decoder.layers),
        places[config.rotations[0]],
        jnp.stack([cache.length, after.length]),
        cache.key,
        cache.value,
    )

    def attend(layer: int, query: Array, view: View, real: Array | None) -> Array:
        by_row = query.reshape(B, T, config.num_heads, config.head_dim)
        return attention(by_row, view, q_lengths=real, **decoder.attention_options(layer)).reshape(B * T, -1)

    def in_launches(arrays: LayersArrays) -> Any:
        """Whole layers in each, with their attention; the twin has operations instead."""

        def twin(arrays: LayersArrays) -> Any:
            held, length = arrays.lengths

            def attend_plain(layer: int, query: Array, keys: Any, values: Any) -> Array:
                return attend(layer, query, DenseView(keys[layer], values[layer], length), length - held)

            return one_by_one(arrays, [arrays.places] * config.num_layers, attend_plain, form, "xla")

        assert request is not None
        return decode_layers(request, arrays, twin)

    def between(arrays: LayersArrays) -> Any:
        """A kernel, or operations, between every two attentions."""

        def attend_cache(layer: int, query: Array, keys: Any, values: Any) -> Array:
            return attend(layer, query, view(dataclasses.replace(after, key=keys, value=values), layer), num_valid)

        own = [places[rotation] for rotation in config.rotations]
        return one_by_one(arrays, own, attend_cache, form, implementation)

    plain = isinstance(cache, DenseCache) and attention is cached_attention  # a user's own attention is called
    plain = plain and takes_whole_layers(config, implementation)
    request = make_layers_request(arrays, form, config.score_scale) if plain else None

    def select(target: Target) -> str:
        return "between" if request is None or layers_refusals(request.on(target)) else "in launches"

    ways = {"in launches": in_launches, "between": between}
    here = resolve_device(None, arrays.x)
    x, keys, values = run_where_lowered(arrays, here, select, lambda name, arrays: ways[name](arrays))
    return decoder.norm(x.reshape(B, T, -1)), dataclasses.replace(after, key=keys, value=values)


def one_by_one(
    arrays: LayersArrays,
    places: Sequence[Places],
    attend: Callable[[int, Array, Any, Any], Array],
    form: BlockForm,
    implementation: Implementation,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """x behind the last layer, and keys and values, by `decode_block` and attention in turns.

    Args:
      arrays: of the step; `places` take the place of its own.
      places: of each layer.
      attend: (layer, query [rows, N, H], keys and values of all layers) -> [rows, N H].
      form: what all layers share.
      implementation: of `decode_block`.
    """
    keys, values = list(arrays.keys), list(arrays.values)
    stream, attended, mlp = start(arrays.x), None, None
    step = functools.partial(decode_block, form=form, implementation=implementation)
    for layer, (weights, own) in enumerate(zip(arrays.layers, places, strict=True)):
        cache = keys[layer], values[layer]
        stream, query, keys[layer], values[layer] = step(stream, attended, mlp, weights.heads, own, cache)  # type: ignore[assignment]
        assert query is not None
        attended, mlp = attend(layer, query, tuple(keys), tuple(values)), weights.mlp
    stream, *_ = step(stream, attended, mlp, None, None, None)
    return stream.residual[: arrays.x.shape[0]], tuple(keys), tuple(values)


def block_form(config: DecoderConfig) -> BlockForm:
    """What all layers of a decoder share."""
    heads = Heads(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    return BlockForm(heads, config.rms_norm_eps, config.traits.unit_offset, config.traits.activation)


def takes_whole_layers(config: DecoderConfig, implementation: Implementation) -> bool:
    """Whether attention may be part of the kernel's launches: it is causal alone, and all layers turn alike."""
    first = "xla" if implementation is None else named(implementation, IMPLEMENTATIONS)[0]
    plain = not any(config.windows) and config.attention_soft_cap is None and len(set(config.rotations)) == 1
    return first == "hopper" and plain


def _heads(block: Block) -> HeadWeights:
    """What makes queries, keys and values of a layer."""
    traits, optional = block.config.traits, {}
    if traits.qkv_bias:
        optional["bias"] = block.qkv_bias[...]
    if traits.qk_norm:
        optional |= {"query_norm": block.q_norm.scale[...], "key_norm": block.k_norm.scale[...]}
    return HeadWeights(block.attention_norm.scale[...], block.qkv[...], **optional)


def _mlp(block: Block) -> MlpWeights:
    """What a layer does behind its attention."""
    return MlpWeights(block.out[...], block.mlp_norm.scale[...], block.gate_up[...], block.down[...])


def _places(config: DecoderConfig, rotation: Any, positions: Array, index: tuple[Array, Array]) -> Places:
    """Where the tokens of a step go, and how a layer turns them; computed once, whatever the layers."""
    cos, sin = rotary_angles(positions, frequencies(config.head_dim, *rotation))
    rows = positions.size
    lead, slot = (x.reshape(rows) for x in index)
    angles = (x.reshape(rows, config.head_dim // 2) for x in (cos, sin))
    # The barrier keeps the compiler from computing them in every layer again.
    return Places(*jax.lax.optimization_barrier((lead, slot, *angles)))
