"""How a decoder lies on a mesh: tensor parallel over key/value heads and over the MLP, data parallel over rows.

    qkv, qkv_bias, gate_up   split over their outputs: whole key/value groups, and F
    out, down                split over their inputs; each of their two products a layer ends in one sum over "model"
    embed, head              split over hidden and over V where that divides them
    keys and values          rows over "data", key/value heads over "model"

Attention and cache writes run in `jax.shard_map`: every device has whole rows and whole groups, so that any kernel
serves it. A forward then sends two sums a layer, and gathers embeddings and logits once.

    mesh = models.decoder_mesh(data=2, model=4)
    checkpoint = models.load(directory, mesh=mesh)
    model = models.as_language_model(checkpoint.config, jnp.bfloat16, mesh=mesh)
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flashspec.attention.views import DenseView, PagedView, View, WindowView
from flashspec.cache import Cache, PagedCache, append
from flashspec.checks import at_least, fail
from flashspec.models.config import DecoderConfig
from flashspec.models.parameter_layout import Path, Spec

DATA, MODEL = "data", "model"
_ROWS, _HEADS = PartitionSpec(DATA), PartitionSpec(DATA, None, MODEL, None)
_PAGES, _TABLE = PartitionSpec(None, None, MODEL, None), PartitionSpec(DATA, None)


def decoder_mesh(data: int, model: int, devices: Any = None) -> Mesh:
    """A mesh of data x model devices with the axes that decoders are split over.

    Args:
      data: over how many devices rows are split.
      model: over how many devices key/value heads and the MLP are split.
      devices: data * model of them; by default the first ones of this process.

    Raises:
      ValueError: a size below 1, or too few devices.
    """
    count = at_least("data", data, 1) * at_least("model", model, 1)
    held = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    if len(held) < count:
        raise fail("devices", f"{count} for a mesh of {data} x {model}", len(held))
    return Mesh(held[:count].reshape(data, model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def check_mesh(config: DecoderConfig, mesh: Mesh) -> Mesh:
    """The mesh with its axes left to the compiler, checked to divide the decoder.

    Raises:
      ValueError: other axes than "data" and "model", or a "model" axis that does not divide K and F.
    """
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != {DATA, MODEL}:
        raise fail(
            "mesh", f"a jax.sharding.Mesh with the axes {DATA!r} and {MODEL!r}", getattr(mesh, "axis_names", mesh)
        )
    for name in ("num_kv_heads", "intermediate_size"):
        if getattr(config, name) % mesh.shape[MODEL]:
            expected = f"an axis {MODEL!r} that divides {name} = {getattr(config, name)}"
            raise fail("mesh", expected, f"{mesh.shape[MODEL]} devices on it")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)


def parameter_spec(config: DecoderConfig, mesh: Mesh, path: Path) -> Spec:
    """For each axis of the parameter at `path` the mesh axis that it is split over, or None."""
    split = mesh.shape[MODEL]
    specs: dict[Any, Spec] = {
        "qkv": (None, MODEL),
        "qkv_bias": (MODEL,),
        "gate_up": (None, None, MODEL),
        "out": (MODEL, None),
        "down": (MODEL, None),
        "embed": (None, None if config.hidden_size % split else MODEL),
        "head": (None, None if config.vocab_size % split else MODEL),
    }
    return specs.get(path[-1], (None,))


def sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    """A spec on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def _cache_specs(cache: Cache) -> Any:
    """A cache with partition specs in place of its arrays; pages are shared by rows, and split by heads alone."""
    held = _PAGES if isinstance(cache, PagedCache) else _HEADS
    return jax.tree.map(lambda x: held if x.ndim == 4 else PartitionSpec(DATA, *(None,) * (x.ndim - 1)), cache)


def split_cache(cache: Cache, mesh: Mesh) -> Cache:
    """A traced or concrete cache with its arrays split over the mesh."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), _cache_specs(cache))
    return jax.lax.with_sharding_constraint(cache, shardings)


def split_append(mesh: Mesh) -> Callable[..., Cache]:
    """`flashspec.cache.append` with every device writing its own rows and heads; pages are the concern of all rows."""

    def write(cache: Cache, layer: int, k: jax.Array, v: jax.Array, num_valid: jax.Array | None) -> Cache:
        if isinstance(cache, PagedCache):
            return append(cache, layer, k, v, num_valid)

        def local(cache: Cache, k: jax.Array, v: jax.Array, num_valid: jax.Array | None) -> Cache:
            return append(cache, layer, k, v, num_valid)

        held = _cache_specs(cache)
        specs = (held, _HEADS, _HEADS, None if num_valid is None else _ROWS)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=held, check_vma=False)(cache, k, v, num_valid)

    return write


def split_rows(x: jax.Array, mesh: Mesh) -> jax.Array:
    """An array [B,T,...] with rows split over the mesh and all else whole on every device."""
    return jax.lax.with_sharding_constraint(x, sharding(mesh, (DATA, *(None,) * (x.ndim - 1))))


def whole_logits(logits: jax.Array, mesh: Mesh) -> jax.Array:
    """Logits [B,T,V], computed where the head lies and then gathered once, so that sampling is local to rows."""
    vocabulary = None if logits.shape[-1] % mesh.shape[MODEL] else MODEL
    return split_rows(jax.lax.with_sharding_constraint(logits, sharding(mesh, (DATA, None, vocabulary))), mesh)


def split_attention(attention: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    """`attention(query [B,T,N,H], view, q_lengths=[B] or None, ...)` with every device at its own rows and heads."""

    def attend(query: jax.Array, view: View, *, q_lengths: jax.Array | None = None, **options: Any) -> jax.Array:
        def local(query: jax.Array, view: View, q_lengths: jax.Array | None) -> jax.Array:
            return attention(query, view, q_lengths=q_lengths, **options)

        specs = (_HEADS, _view_specs(view), None if q_lengths is None else _ROWS)
        call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=_HEADS, check_vma=False)
        return call(query, view, q_lengths)

    return attend


def _view_specs(view: View) -> View:
    """A view with partition specs in place of its arrays."""
    specs: Any = {"key": _HEADS, "value": _HEADS, "length": _ROWS}
    if isinstance(view, DenseView):
        return DenseView(**specs)
    if isinstance(view, WindowView):
        return WindowView(**specs | {"positions": _TABLE})
    paged: Any = {"key_pages": _PAGES, "value_pages": _PAGES, "page_table": _TABLE, "length": _ROWS}
    return PagedView(**paged)
