"""The decoder-only transformer: one stack of blocks, run with a cache (`step`) or over whole sequences (`__call__`).

Attention is handed in and the cache is explicit, so the decoder knows neither backends nor cache layouts. Weights that
read the same input are stored as one matrix, [inputs, outputs] like every kernel here:

    qkv      [hidden, K * (G + 2) * H]   per key/value head: its G query heads, its key, its value
    gate_up  [hidden, 2, F]              the gate, and the value that it gates
    embed    [V, hidden]                 absent when tied: the head's columns are the embeddings
    head     [hidden, V]

so that a step is four matrix products a layer, and a split over key/value heads or over F keeps together what belongs
together. What only some families have (`Family`) is decided while the module is built, not while it runs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flashspec.cache import append, view
from flashspec.checks import shape
from flashspec.fusion import gated_product
from flashspec.language_model import Params
from flashspec.models.config import DecoderConfig
from flashspec.models.rotary import frequencies, rotary_angles, rotate

Array = jax.Array
# Attention of one layer: (its index, query [B,T,N,H], key and value [B,T,K,H]) -> [B,T,N,H].
type Attend = Callable[[int, Array, Array, Array], Array]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
FUSED = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # their names in `flashspec.fusion`


def _unchanged(x: Array) -> Array:
    return x


def _matmul(x: Array, kernel: Array, precision: str | None, dtype: Any = None) -> Array:
    """x [B,T,inputs] times kernel [inputs,...] into `dtype`, by default their own.

    Without a `precision` it is the highest one, unless the operands are 16-bit floats.
    """
    if precision is None and kernel.dtype.itemsize > 2:
        precision = "highest"
    return jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ())), precision, preferred_element_type=dtype)


class RMSNorm(nnx.Module):
    """scale * x / sqrt(mean(x^2) + eps) over the last axis, the mean in float32 or better.

    With `unit_offset` it multiplies by 1 + scale, and returns to the input's dtype only then.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), equation 4.
    """

    def __init__(self, size: int, eps: float, dtype: Any, unit_offset: bool):
        self.scale = nnx.Param((jnp.zeros if unit_offset else jnp.ones)((size,), dtype))
        self.eps, self.unit_offset = eps, unit_offset

    def __call__(self, x: Array) -> Array:
        work = x.astype(np.promote_types(x.dtype, np.float32))
        work = work * jax.lax.rsqrt(jnp.mean(jnp.square(work), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.unit_offset:
            return (work * (1 + scale.astype(work.dtype))).astype(x.dtype)
        return work.astype(x.dtype) * scale


def _kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> nnx.Param:
    """Normal entries of standard deviation scale / sqrt(inputs), the first of the sizes."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * (scale * shape[0] ** -0.5))


class Block(nnx.Module):
    """One pre-norm decoder layer: attention and a gated MLP, each added to the residual stream."""

    def __init__(
        self, config: DecoderConfig, rngs: nnx.Rngs, dtype: Any, precision: str | None, gated_product: str | None
    ):
        hidden, inner, size, traits = config.hidden_size, config.intermediate_size, config.head_dim, config.traits
        branch, columns = (2 * config.num_layers) ** -0.5, (config.num_heads + 2 * config.num_kv_heads) * size
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, unit_offset=traits.unit_offset)
        self.config, self.precision, self.gated_product = config, precision, gated_product
        self.attention_norm = norm(hidden)
        self.qkv = _kernel(rngs, (hidden, columns), dtype)
        self.out = _kernel(rngs, (config.num_heads * size, hidden), dtype, branch)
        self.mlp_norm = norm(hidden)
        self.gate_up = _kernel(rngs, (hidden, 2, inner), dtype)
        self.down = _kernel(rngs, (inner, hidden), dtype, branch)
        if traits.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros((columns,), dtype))
        if traits.qk_norm:
            self.q_norm, self.k_norm = norm(size), norm(size)
        if traits.post_norms:
            self.post_attention_norm, self.post_mlp_norm = norm(hidden), norm(hidden)

    def project(self, x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """Query [B,T,N,H], key and value [B,T,K,H] of normalised `x`, with positions applied."""
        config, traits = self.config, self.config.traits
        kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        fused = _matmul(x, self.qkv[...], self.precision)
        if traits.qkv_bias:
            fused = fused + self.qkv_bias[...][None, None, :]
        fused = fused.reshape(*x.shape[:2], kv_heads, group + 2, config.head_dim)
        turned = fused[..., : group + 1, :]
        if traits.qk_norm:
            query, key = self.q_norm(turned[..., :group, :]), self.k_norm(turned[..., group:, :])
            turned = jnp.concatenate([query, key], axis=-2)
        turned = rotate(turned, cos, sin)
        query = turned[..., :group, :].reshape(*x.shape[:2], config.num_heads, config.head_dim)
        return query, turned[..., group, :], fused[..., group + 1, :]

    def mlp(self, x: Array) -> Array:
        """The gated MLP of normalised x [B,T,hidden]."""
        name = FUSED[self.config.traits.activation]
        options: dict[str, Any] = {"unfused": self._gated, "implementation": self.gated_product}
        return _matmul(gated_product(x, self.gate_up[...], activation=name, **options), self.down[...], self.precision)

    def _gated(self, x: Array, weights: Array) -> Array:
        """The gate and what it gates by one product, whose result is rounded."""
        gate_up = _matmul(x, weights, self.precision)  # [B,T,2,F]; a flat kernel would not stay split over F
        return ACTIVATIONS[self.config.traits.activation](gate_up[..., 0, :]) * gate_up[..., 1, :]

    def __call__(
        self, x: Array, cos: Array, sin: Array, attend: Callable[..., Array], drop: Callable[[Array], Array]
    ) -> Array:
        attended = attend(*self.project(self.attention_norm(x), cos, sin))
        attended = _matmul(attended.reshape(*x.shape[:2], -1), self.out[...], self.precision)
        post_norms = self.config.traits.post_norms
        x = x + drop(self.post_attention_norm(attended) if post_norms else attended)
        mlp = self.mlp(self.mlp_norm(x))
        return x + drop(self.post_mlp_norm(mlp) if post_norms else mlp)


class Decoder(nnx.Module):
    """A decoder-only transformer of any of `FAMILIES`.

    Args:
      config: its shape.
      rngs: initial weights; load a checkpoint to replace them.
      dtype: of parameters, activations and keys; norms, rotations and logits are float32 at least.
      precision: of matrix products, as `jnp.matmul` takes it; None is "highest" for float32 and float64, and the
        backend's default for 16-bit floats.
      gated_product: who computes the MLP's gate and what it gates, as `flashspec.fusion.gated_product` says: "unfused"
        for a product whose result is rounded and then activated, an implementation of `matmul_epilogue`, such as
        "hopper", or None for the one of the two that was measured to be faster.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        precision: str | None = None,
        gated_product: str | None = None,
    ):
        self.config, self.precision = config, precision
        if not config.tie_embeddings:
            self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Block(config, rngs, dtype, precision, gated_product) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, config.traits.unit_offset)
        self.head = _kernel(rngs, (config.hidden_size, config.vocab_size), dtype)

    def hidden(self, x: Array, positions: Array, attend: Attend, drop: Callable[[Array], Array] = _unchanged) -> Array:
        """The blocks over embeddings x [B,T,hidden] at logical `positions` [B,T]; returns [B,T,hidden], normalised."""
        rotations, size = self.config.rotations, self.config.head_dim
        # The barrier keeps the compiler from fusing the cosines into every layer that uses them.
        angles = {
            rotation: jax.lax.optimization_barrier(rotary_angles(positions, frequencies(size, *rotation)))
            for rotation in dict.fromkeys(rotations)
        }
        for index, (block, rotation) in enumerate(zip(self.layers, rotations, strict=True)):
            cos, sin = angles[rotation]
            x = block(x, cos, sin, lambda q, k, v, index=index: attend(index, q, k, v), drop)
        return self.norm(x)

    def logits(self, hidden: Array) -> Array:
        """Logits [B,T,V] of normalised hidden states, in float32 or better."""
        logits = _matmul(hidden, self.head[...], self.precision, np.promote_types(hidden.dtype, np.float32))
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def attention_options(self, layer: int) -> dict[str, Any]:
        """What attention of a layer is told besides its operands; what the defaults say is left out."""
        config = self.config
        options = {"window": config.windows[layer], "logits_soft_cap": config.attention_soft_cap}
        if config.query_pre_attn_scalar is not None:
            options["scale"] = config.score_scale
        return {name: value for name, value in options.items() if value is not None}

    def __call__(
        self,
        tokens: Array,
        *,
        attention: Callable[..., Array],
        positions: Array | None = None,
        drop: Callable[[Array], Array] = _unchanged,
    ) -> Array:
        """Logits of whole sequences without a cache, for training and as the oracle of cached steps.

        Args:
          tokens: [B,T], integers.
          attention: called as `attention(query, key, value, is_causal=True, q_positions=positions,
            kv_positions=positions, window=window, scale=scale, logits_soft_cap=cap)`, all behind the first only where
            the call or the model has them; `flashspec.attention.dot_product_attention` fits.
          positions: [B,T] logical positions; None for 0..T-1.
          drop: applied to what each branch adds to the residual stream; dropout goes here.

        Returns:
          [B,T,V], float32 or better: the logits of the token after each.
        """
        shape("tokens", tokens, "B T")
        where: dict[str, Any] = {}
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        else:
            where = {"q_positions": positions, "kv_positions": positions}

        def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
            return attention(query, key, value, is_causal=True, **where, **self.attention_options(layer))

        # Whole rows make the gradient's scatter contiguous; over a long sequence the transposition is nothing.
        rows = self.head[...].T if self.config.tie_embeddings else self.embed[...]
        return self.logits(self.hidden(self._scaled(jnp.take(rows, tokens, axis=0)), positions, attend, drop))

    def step(
        self,
        tokens: Array,
        cache: Any,
        *,
        attention: Callable[..., Array],
        num_valid: Array | None = None,
        place: Callable[[Array], Array] = _unchanged,
        write: Callable[..., Any] = append,
    ) -> tuple[Array, Any]:
        """Append `tokens` to the cache, and give the hidden state after each, which `logits` reads.

        Args:
          tokens: [B,T], integers; row b continues at logical position `cache.length[b]`.
          cache: one of `flashspec.cache`, for this decoder's layers, key/value heads and head size.
          attention: called as `flashspec.attention.decode.cached_attention(query, view, q_lengths=num_valid,
            window=window, scale=scale, logits_soft_cap=cap)`, the last three only where the layer has them.
          num_valid: [B], the first so many tokens of each row are real; None for all.
          place: applied to all that enters the residual stream [B,T,hidden]; where it lies on a mesh goes here.
          write: `flashspec.cache.append`, or what does the same on a mesh.

        Returns:
          (hidden [B,T,hidden], normalised; the cache with `length` advanced by `num_valid` or T).
        """
        shape("tokens", tokens, "B T")
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=cache.length.dtype)[None, :]

        def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
            nonlocal cache
            cache = write(cache, layer, key, value, num_valid)
            return attention(query, view(cache, layer), q_lengths=num_valid, **self.attention_options(layer))

        hidden = self.hidden(place(self.embed_few(tokens)), positions, attend, place)
        return hidden, cache

    def embed_few(self, tokens: Array) -> Array:
        """What the first block reads [B,T,hidden]; of a tied head columns: transposing it is dearer than a step."""
        if self.config.tie_embeddings:
            return self._scaled(jnp.moveaxis(jnp.take(self.head[...], tokens, axis=1), 0, -1))
        return self._scaled(jnp.take(self.embed[...], tokens, axis=0))

    def _scaled(self, embeddings: Array) -> Array:
        """Embeddings as the first block reads them; their factor is rounded to their dtype, as in training."""
        if not self.config.traits.scaled_embeddings:
            return embeddings
        return embeddings * jnp.asarray(self.config.hidden_size**0.5, embeddings.dtype)


@functools.cache
def _graph(config: DecoderConfig, precision: str | None, gated_product: str | None) -> nnx.GraphDef[Decoder]:
    options = {"precision": precision, "gated_product": gated_product}
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options)))[0]


def merge(
    config: DecoderConfig, params: Params, precision: str | None = None, gated_product: str | None = None
) -> Decoder:
    """The module that `config` describes around `params`; costs nothing inside a traced function."""
    return nnx.merge(_graph(config, precision, gated_product), params)
