"""The decoder as generation sees it: a `LanguageModel` over a parameter tree, with a cache of one of three kinds."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from flashspec.attention.decode import cached_attention
from flashspec.cache import Cache, dense_cache, paged_cache, window_cache
from flashspec.checks import at_least, fail, one_of
from flashspec.fusion import GatedProductPlan, plan_gated_product
from flashspec.fusion.decode_block import IMPLEMENTATIONS
from flashspec.fusion.gated import IMPLEMENTATIONS as GATED_PRODUCTS
from flashspec.fusion.gated import UNFUSED
from flashspec.language_model import LanguageModel, Params
from flashspec.models.config import DecoderConfig
from flashspec.models.decoder import FUSED, Decoder, merge
from flashspec.models.fused_step import MAX_ROWS, fused_step
from flashspec.models.fused_step import refusals as fused_refusals
from flashspec.models.partition import (
    DATA,
    check_mesh,
    split_append,
    split_attention,
    split_cache,
    split_rows,
    whole_logits,
)
from flashspec.selection import Implementation, named
from pallas_kernels.launch import round_up

CACHES = ("dense", "window", "paged")
PREFILL_CHUNK = 512
ON_A_MESH = "the model lies on a mesh, where XLA multiplies parts of the weights where they lie"
SLOT_MULTIPLE = 8  # of dense and window caches: what kernels read without a copy


@dataclasses.dataclass(frozen=True)
class _Functions:
    """The pure functions of one `LanguageModel`, and the choices that they close over."""

    config: DecoderConfig
    dtype: Any
    cache: str
    draft_length: int
    page_size: int
    attention: Callable[..., jax.Array]
    precision: str | None
    gated_product: str | None
    mesh: Mesh | None
    decode_block: Implementation

    @property
    def left(self) -> int:
        """How far back the model's own window reaches."""
        return self.config.window[0] if self.config.window else 0

    @property
    def chunk(self) -> int:
        """Most tokens that one prefill forward appends to a window cache."""
        return max(self.draft_length + 1, min(PREFILL_CHUNK, self.left + 1))

    def apply(self, params: Params, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        decoder = merge(self.config, params, self.precision, self.gated_product)
        hidden, cache = self._step(decoder, tokens, cache)
        logits = decoder.logits(hidden)
        return logits if self.mesh is None else whole_logits(logits, self.mesh), cache

    def prefill(self, params: Params, tokens: jax.Array, num_valid: jax.Array, cache: Cache) -> Cache:
        decoder = merge(self.config, params, self.precision, self.gated_product)
        chunk = self.chunk if self.cache == "window" else max(tokens.shape[1], 1)
        for start in range(0, tokens.shape[1], chunk):
            part = tokens[:, start : start + chunk]
            valid = jnp.clip(num_valid - start, 0, part.shape[1])
            _, cache = self._step(decoder, part, cache, valid)
        return cache

    def _step(
        self, decoder: Decoder, tokens: jax.Array, cache: Cache, num_valid: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """`Decoder.step`, fused where that was asked for and the tokens are few."""
        if self.decode_block is None or tokens.size > MAX_ROWS:
            return decoder.step(tokens, cache, num_valid=num_valid, **self._ways)
        how: dict[str, Any] = {"attention": self.attention, "implementation": self.decode_block}
        return fused_step(decoder, tokens, cache, num_valid=num_valid, **how)

    @property
    def _ways(self) -> dict[str, Any]:
        """How a step attends, and where its arrays lie."""
        if self.mesh is None:
            return {"attention": self.attention}
        mesh = self.mesh
        return {
            "attention": split_attention(self.attention, mesh),
            "place": lambda x: split_rows(x, mesh),
            "write": split_append(mesh),
        }

    def init_cache(self, batch: int, capacity: int) -> Cache:
        if self.mesh is None:
            return self._new_cache(batch, capacity)
        if batch % self.mesh.shape[DATA]:
            raise fail("batch", f"rows that the mesh's axis {DATA!r} of {self.mesh.shape[DATA]} devices divides", batch)
        return split_cache(self._new_cache(batch, capacity), self.mesh)

    def _new_cache(self, batch: int, capacity: int) -> Cache:
        sizes = {"K": self.config.num_kv_heads, "H": self.config.head_dim, "dtype": self.dtype}
        layers = self.config.num_layers
        if self.cache == "window":
            slots = round_up(self.left + self.chunk, SLOT_MULTIPLE)
            return window_cache(self.left, self.draft_length, layers, batch, slots=slots, **sizes)
        if self.cache == "paged":
            pages = -(-capacity // self.page_size)
            return paged_cache(self.page_size, batch * pages, layers, batch, capacity=capacity, **sizes)
        return dense_cache(layers, batch, round_up(capacity, SLOT_MULTIPLE), **sizes)


@functools.cache
def as_language_model(
    config: DecoderConfig,
    dtype: Any = jnp.float32,
    *,
    cache: str = "dense",
    draft_length: int = 15,
    page_size: int = 64,
    attention: Callable[..., jax.Array] = cached_attention,
    precision: str | None = None,
    gated_product: str | None = None,
    mesh: Mesh | None = None,
    decode_block: Implementation = None,
) -> LanguageModel:
    """A decoder as generation sees it; its parameters are those of `load`, or `nnx.state(decoder, nnx.Param)`.

    Equal arguments give the same object, so programs compiled for a model are found again.

    Args:
      config: the decoder's shape.
      dtype: of the parameters that will be passed, and so of the cache.
      cache: "dense"; "window", a ring buffer, for a model whose layers all have a window; or "paged". Where only some
        layers have one, a dense or paged cache keeps every position and attention applies each layer's own window.
      draft_length: the longest draft D that a window cache must be able to take back.
      page_size: positions in a page of a paged cache; each row gets pages for its whole capacity.
      attention: called as `Decoder.step` says; `cached_attention` has its arguments.
      precision: of matrix products; None is "highest" for float32 and float64.
      gated_product: who computes the MLP's gate and what it gates, as `Decoder` says; `plan_mlp` says which. None for
        the fastest by measurement; with a mesh it is XLA always, which multiplies the parts where they lie.
      mesh: devices with the axes "data" and "model" (`decoder_mesh`) over which rows and heads are split; pass
        parameters that lie on it (`load(mesh=)` or `place`).
      decode_block: "hopper" for one kernel between every two attentions in forwards of up to 16 tokens, all rows
        together, on the GPUs and for the sizes that `flashspec.fusion.decode_block` says; or, over a dense cache
        without windows or an `attention` of one's own, one kernel for some layers with their attention. Or other
        implementations (a tuple of them for the first that can). None for products one by one, which were slower on
        an H200 up to eight rows, in small models above all, and faster from nine on. Two programs with such a kernel
        must not run on one device at once: each waits for all of its multiprocessors.

    Returns:
      A `LanguageModel` with logits [B,T,V] in float32 or better. Its prefill skips the head, and goes in chunks where a
      window cache needs it.

    Raises:
      ValueError: an unknown cache, or a window cache for a model in which some layer attends to its whole prefix, which
        would change its results; a mesh that does not divide the model; an unknown implementation of either kind.
      NotImplementedError: `decode_block` for a mesh, a precision, or a family for which there is no such operation.
    """
    one_of("cache", cache, CACHES)
    product = _gated_product(gated_product, mesh)
    if cache == "window" and config.window is None:
        raise fail("cache", "'dense' or 'paged' for a model with layers that attend to the whole prefix", repr(cache))
    at_least("draft_length", draft_length, 0)
    at_least("page_size", page_size, 1)
    if mesh is not None:
        mesh = check_mesh(config, mesh)
    if decode_block is not None:
        _check_fused(config, mesh, precision, decode_block)
    choices = draft_length, page_size, attention, precision, product, mesh, decode_block
    own = _Functions(config, jnp.dtype(dtype), cache, *choices)
    return LanguageModel(own.apply, own.init_cache, config.vocab_size, own.prefill)


def _check_fused(
    config: DecoderConfig, mesh: Mesh | None, precision: str | None, implementation: Implementation
) -> None:
    """Refuse a fused step that there is not."""
    named(implementation or (), IMPLEMENTATIONS)
    reasons = fused_refusals(config)
    reasons += () if mesh is None else ("it reads the arrays of one device, not of a mesh",)
    reasons += () if precision is None else (f"it has one precision of products, not {precision!r}",)
    if reasons:
        raise NotImplementedError("no fused step:\n" + "\n".join(f"  {reason}" for reason in reasons))


def _gated_product(asked: str | None, mesh: Mesh | None) -> str | None:
    """Who is asked to compute the gated product: on a mesh always XLA, which multiplies the parts where they lie."""
    one_of("gated_product", asked, (None, *GATED_PRODUCTS))
    return asked if mesh is None else UNFUSED


def plan_mlp(
    config: DecoderConfig,
    rows: int,
    dtype: Any = jnp.float32,
    *,
    gated_product: str | None = None,
    mesh: Mesh | None = None,
    device: jax.Device | str | None = None,
) -> GatedProductPlan:
    """Who computes the gate of the MLP and what it gates in a forward of a model, and why; computes nothing.

    A forward of up to 16 rows through `decode_block` has the MLP in that kernel.

    Args:
      config, dtype, gated_product, mesh: as in `as_language_model`.
      rows: B times T, of one forward.
      device: a device or the kind of one, such as "NVIDIA H200"; the default one by default.

    Returns:
      The plan; `print` shows it as lines.

    Raises:
      ValueError: as `as_language_model`, or rows below 1.
      NotImplementedError: `gated_product` cannot run it.
    """
    product = _gated_product(gated_product, mesh)
    if mesh is not None:
        check_mesh(config, mesh)
    x = jax.ShapeDtypeStruct((at_least("rows", rows, 1), config.hidden_size), dtype)
    w = jax.ShapeDtypeStruct((config.hidden_size, 2, config.intermediate_size), dtype)
    plan = plan_gated_product(x, w, activation=FUSED[config.traits.activation], implementation=product, device=device)
    return plan if mesh is None else dataclasses.replace(plan, reasons=(ON_A_MESH,))


def shallow(config: DecoderConfig, params: Params, layers: int) -> tuple[DecoderConfig, Params]:
    """The model's first `layers` layers with its own embeddings, norm and head: a draft that needs no training.

    Args:
      config: the decoder's shape.
      params: its parameters; the result shares their arrays.
      layers: how many to keep, from 1 to all.

    Returns:
      (config, params) for `as_language_model` and a `ShallowDrafter`.

    Raises:
      ValueError: `layers` is out of range.
    """
    if at_least("layers", layers, 1) > config.num_layers:
        raise fail("layers", f"at most {config.num_layers}, the model's own", layers)

    def is_kept(path: tuple[Any, ...]) -> bool:
        return path[0] != "layers" or path[1] < layers

    kept = [(path, leaf) for path, leaf in nnx.to_flat_state(params) if is_kept(path)]
    return dataclasses.replace(config, num_layers=layers), nnx.from_flat_state(kept)
