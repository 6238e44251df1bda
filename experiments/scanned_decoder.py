"""The decoder in the form that compiles fastest and that a GPU pays for: a scan over layers, their weights stacked."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from flashspec import models
from flashspec.attention.decode import cached_attention
from flashspec.cache import Cache, append, view
from flashspec.language_model import LanguageModel, Params
from flashspec.models.decoder import merge
from flashspec.models.rotary import frequencies, rotary_angles


def scanned(config: models.DecoderConfig, params: Params, model: LanguageModel) -> tuple[LanguageModel, Params]:
    """The same model with one body for all layers.

    Args:
      config: a decoder whose layers are all alike, so the first stands for each.
      params: of `model`.
      model: the decoder with its layers one after another.

    Returns:
      (model, params): weights [L, ...] and a cache [L, B, S, K, H] that a scan takes slices of.
    """
    one = dataclasses.replace(config, num_layers=1)
    flat = nnx.to_flat_state(params)
    outer = {path: leaf[...] for path, leaf in flat if path[0] != "layers"}
    names = [path[2:] for path, _ in flat if path[:2] == ("layers", 0)]
    layers = [{path[2:]: leaf for path, leaf in flat if path[:2] == ("layers", i)} for i in range(config.num_layers)]
    stacked = [jnp.stack([layer[name][...] for layer in layers]) for name in names]

    def decoder_of(rest: list[Array], layer: list[Array]) -> Any:
        paths: list[Any] = [*outer, *(("layers", 0, *name) for name in names)]
        leaves = [nnx.Param(leaf) for leaf in (*rest, *layer)]
        return merge(one, nnx.from_flat_state(list(zip(paths, leaves, strict=True))))

    def apply(params: Params, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        rest, stacked = params
        outside = decoder_of(rest, [leaf[0] for leaf in stacked])
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        cos, sin = rotary_angles(positions, frequencies(config.head_dim, *config.rotations[0]))

        def layer(x: Array, xs: Any) -> tuple[Array, Any]:
            leaves, key, value = xs
            own = dataclasses.replace(cache, key=(key,), value=(value,))

            def attend(query: Array, key: Array, value: Array) -> Array:
                nonlocal own
                own = append(own, 0, key, value, None)
                return cached_attention(query, view(own, 0))

            x = decoder_of(rest, leaves).layers[0](x, cos, sin, attend, lambda x: x)
            return x, (own.key[0], own.value[0], own.length)

        x = outside.embed[...][tokens]
        x, (keys, values, lengths) = lax.scan(layer, x, (stacked, cache.key[0], cache.value[0]))
        cache = dataclasses.replace(cache, key=(keys,), value=(values,), length=lengths[0])
        return outside.logits(outside.norm(x)), cache

    def init_cache(batch: int, capacity: int) -> Cache:
        cache = model.init_cache(batch, capacity)
        return dataclasses.replace(cache, key=(jnp.stack(cache.key),), value=(jnp.stack(cache.value),))

    return LanguageModel(apply, init_cache, config.vocab_size), (list(outer.values()), stacked)
