"""The decoder-only transformer: one stack of blocks, run with a cache (`step`) or over whole sequences (`__call__`).

Attention is handed in and the cache is explicit, so the decoder knows neither backends nor cache layouts. Weights that
read the same input are stored as one matrix, [inputs, outputs] like every kernel here:

    qkv      [hidden, K * (G + 2) * H]   per key/value head: its G query heads, its key, its value
    gate_up  [hidden, 2 * F]             the gate, then the value that it gates
    embed    [V, hidden]                 absent when tied: the head's columns are the embeddings
    head     [hidden, V]

so that a step is four matrix products a layer, and a split over key/value heads keeps groups whole.
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
from flashspec.language_model import Params
from flashspec.models.config import DecoderConfig
from flashspec.models.rotary import rotary_angles, rotate

Array = jax.Array
# Attention of one layer: (its index, query [B,T,N,H], key and value [B,T,K,H]) -> [B,T,N,H].
type Attend = Callable[[int, Array, Array, Array], Array]


def _unchanged(x: Array) -> Array:
    return x


def _matmul(x: Array, kernel: Array, precision: str | None, dtype: Any = None) -> Array:
    """x @ kernel into `dtype`, by default their own and at the highest precision unless that is a 16-bit float."""
    if precision is None and kernel.dtype.itemsize > 2:
        precision = "highest"
    return jnp.matmul(x, kernel, precision=precision, preferred_element_type=dtype)


class RMSNorm(nnx.Module):
    """scale * x / sqrt(mean(x^2) + eps) over the last axis, the mean in float32 or better.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), equation 4.
    """

    def __init__(self, size: int, eps: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        work = x.astype(np.promote_types(x.dtype, np.float32))
        work = work * jax.lax.rsqrt(jnp.mean(jnp.square(work), axis=-1, keepdims=True) + self.eps)
        return work.astype(x.dtype) * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))


def _kernel(rngs: nnx.Rngs, inputs: int, outputs: int, dtype: Any, scale: float = 1.0) -> nnx.Param:
    """Normal entries of standard deviation scale / sqrt(inputs)."""
    return nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs), dtype) * (scale * inputs**-0.5))


class Block(nnx.Module):
    """One pre-norm decoder layer: attention and a gated MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: Any, precision: str | None):
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        branch = (2 * config.num_layers) ** -0.5
        self.config, self.precision = config, precision
        self.attention_norm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.qkv = _kernel(rngs, hidden, (config.num_heads + 2 * config.num_kv_heads) * size, dtype)
        self.out = _kernel(rngs, config.num_heads * size, hidden, dtype, branch)
        self.mlp_norm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.gate_up = _kernel(rngs, hidden, 2 * inner, dtype)
        self.down = _kernel(rngs, inner, hidden, dtype, branch)
        if config.qk_norm:
            self.q_norm = RMSNorm(size, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(size, config.rms_norm_eps, dtype)

    def project(self, x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """Query [B,T,N,H], key and value [B,T,K,H] of normalised `x`, with positions applied."""
        config = self.config
        kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        fused = _matmul(x, self.qkv[...], self.precision)
        fused = fused.reshape(*x.shape[:2], kv_heads, group + 2, config.head_dim)
        turned = fused[..., : group + 1, :]
        if config.qk_norm:
            query, key = self.q_norm(turned[..., :group, :]), self.k_norm(turned[..., group:, :])
            turned = jnp.concatenate([query, key], axis=-2)
        turned = rotate(turned, cos, sin)
        query = turned[..., :group, :].reshape(*x.shape[:2], config.num_heads, config.head_dim)
        return query, turned[..., group, :], fused[..., group + 1, :]

    def __call__(
        self, x: Array, cos: Array, sin: Array, attend: Callable[..., Array], drop: Callable[[Array], Array]
    ) -> Array:
        attended = attend(*self.project(self.attention_norm(x), cos, sin))
        x = x + drop(_matmul(attended.reshape(*x.shape[:2], -1), self.out[...], self.precision))
        gate, up = jnp.split(_matmul(self.mlp_norm(x), self.gate_up[...], self.precision), 2, axis=-1)
        return x + drop(_matmul(jax.nn.silu(gate) * up, self.down[...], self.precision))


class Decoder(nnx.Module):
    """A decoder-only transformer of the Llama kind.

    Args:
      config: its shape.
      rngs: initial weights; load a checkpoint to replace them.
      dtype: of parameters, activations and keys; norms, rotations and logits are float32 at least.
      precision: of matrix products, as `jnp.matmul` takes it; None is "highest" for float32 and float64, and the
        backend's default for 16-bit floats.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, precision: str | None = None
    ):
        self.config, self.precision = config, precision
        if not config.tie_embeddings:
            self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Block(config, rngs, dtype, precision) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = _kernel(rngs, config.hidden_size, config.vocab_size, dtype)

    def hidden(self, x: Array, positions: Array, attend: Attend, drop: Callable[[Array], Array] = _unchanged) -> Array:
        """The blocks over embeddings x [B,T,hidden] at logical `positions` [B,T]; returns [B,T,hidden], normalised."""
        # The barrier keeps the compiler from fusing the cosines into every layer that uses them.
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        cos, sin = jax.lax.optimization_barrier(angles)
        for index, block in enumerate(self.layers):
            x = block(x, cos, sin, lambda q, k, v, index=index: attend(index, q, k, v), drop)
        return self.norm(x)

    def logits(self, hidden: Array) -> Array:
        """Logits [B,T,V] of normalised hidden states, in float32 or better."""
        return _matmul(hidden, self.head[...], self.precision, np.promote_types(hidden.dtype, np.float32))

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
            kv_positions=positions, window=window)`, the last three only where they are not None;
            `flashspec.attention.dot_product_attention` fits.
          positions: [B,T] logical positions; None for 0..T-1.
          drop: applied to what each branch adds to the residual stream; dropout goes here.

        Returns:
          [B,T,V], float32 or better: the logits of the token after each.
        """
        shape("tokens", tokens, "B T")
        options: dict[str, Any] = {} if self.config.window is None else {"window": self.config.window}
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        else:
            options |= {"q_positions": positions, "kv_positions": positions}

        def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
            return attention(query, key, value, is_causal=True, **options)

        # Whole rows make the gradient's scatter contiguous; over a long sequence the transposition is nothing.
        rows = self.head[...].T if self.config.tie_embeddings else self.embed[...]
        return self.logits(self.hidden(jnp.take(rows, tokens, axis=0), positions, attend, drop))

    def step(
        self,
        tokens: Array,
        cache: Any,
        *,
        attention: Callable[..., Array],
        num_valid: Array | None = None,
    ) -> tuple[Array, Any]:
        """Append `tokens` to the cache, and give the hidden state after each, which `logits` reads.

        Args:
          tokens: [B,T], integers; row b continues at logical position `cache.length[b]`.
          cache: one of `flashspec.cache`, for this decoder's layers, key/value heads and head size.
          attention: `flashspec.attention.decode.cached_attention` or a callable with its arguments.
          num_valid: [B], the first so many tokens of each row are real; None for all.

        Returns:
          (hidden [B,T,hidden], normalised; the cache with `length` advanced by `num_valid` or T).
        """
        shape("tokens", tokens, "B T")
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=cache.length.dtype)[None, :]

        def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
            nonlocal cache
            cache = append(cache, layer, key, value, num_valid)
            return attention(query, view(cache, layer), q_lengths=num_valid, window=self.config.window)

        hidden = self.hidden(self._embed_few(tokens), positions, attend)
        return hidden, cache

    def _embed_few(self, tokens: Array) -> Array:
        """Embeddings [B,T,hidden]; from a tied head its columns: to transpose it costs more than a step reads."""
        if self.config.tie_embeddings:
            return jnp.moveaxis(jnp.take(self.head[...], tokens, axis=1), 0, -1)
        return jnp.take(self.embed[...], tokens, axis=0)


@functools.cache
def _graph(config: DecoderConfig, precision: str | None) -> nnx.GraphDef[Decoder]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), precision=precision)))[0]


def merge(config: DecoderConfig, params: Params, precision: str | None = None) -> Decoder:
    """The module that `config` describes around `params`; costs nothing inside a traced function."""
    return nnx.merge(_graph(config, precision), params)
