"""Where each parameter of the decoder lies in a checkpoint: one table, which loading, checking and saving all read.

A weight is [outputs, inputs] in the file and [inputs, outputs] in the decoder, where weights that read the same input
are one array. A `Layout` joins the stored tensors into that array and splits it again.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.models.config import DecoderConfig

type Path = tuple[Any, ...]  # names of attributes and numbers of layers
type Spec = tuple[Any, ...]  # for each axis the mesh axis that it is split over, or None

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@runtime_checkable
class Layout(Protocol):
    """How one parameter is made of stored tensors; hashable, so that layers of one shape share a compiled program."""

    def __hash__(self) -> int: ...

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """The parameter, from its stored tensors in order."""

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """The stored tensors, in order."""

    def stored_spec(self, spec: Spec) -> Spec:
        """How each stored tensor has to be split over a mesh so that joining moves nothing between devices."""


@dataclasses.dataclass(frozen=True)
class AsStored:
    """One tensor, unchanged."""

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        return jnp.array(tensors[0], copy=True)  # on a CPU the tensor may be the file's own memory

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        return [array]

    def stored_spec(self, spec: Spec) -> Spec:
        return spec


@dataclasses.dataclass(frozen=True)
class Transposed:
    """One weight [outputs, inputs] as [inputs, outputs]."""

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        return tensors[0].T

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        return [array.T]

    def stored_spec(self, spec: Spec) -> Spec:
        return spec[::-1]


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Weights [outputs, inputs] of one shape side by side, [inputs, weights, outputs]."""

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([tensor.T for tensor in tensors], axis=1)

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        return [array[:, i].T for i in range(array.shape[1])]

    def stored_spec(self, spec: Spec) -> Spec:
        return spec[2], spec[0]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Query, key and value weights [heads * H, inputs], or biases [heads * H], with each key/value group contiguous.

    Attributes:
      kv_heads: K.
      group_rows: outputs of one key/value head's group in each tensor, (G * H, H, H).
    """

    kv_heads: int
    group_rows: tuple[int, int, int]

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        grouped = [tensor.reshape(self.kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
        return jnp.concatenate(grouped, axis=1).reshape(-1, *tensors[0].shape[1:]).T

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        stored = array.T
        grouped = stored.reshape(self.kv_heads, -1, *stored.shape[1:])
        parts = np.split(grouped, np.cumsum(self.group_rows)[:-1], axis=1)
        return [part.reshape(-1, *stored.shape[1:]) for part in parts]

    def stored_spec(self, spec: Spec) -> Spec:
        return spec[::-1]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter.

    Attributes:
      path: in the decoder.
      shapes: of the stored tensors that make it up, by name and in order.
      layout: joins and splits them.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    layout: Layout


def slots(config: DecoderConfig) -> Iterator[Slot]:
    """Every parameter of the decoder with its tensors in the file."""
    if not config.tie_embeddings:
        yield Slot(("embed",), {EMBEDDINGS: (config.vocab_size, config.hidden_size)}, AsStored())
    for layer in range(config.num_layers):
        for slot in (*_attention(config), *_mlp(config)):
            shapes = {f"model.layers.{layer}.{name}": shape for name, shape in slot.shapes.items()}
            yield Slot(("layers", layer, *slot.path), shapes, slot.layout)
    yield Slot(("norm", "scale"), {"model.norm.weight": (config.hidden_size,)}, AsStored())
    head = EMBEDDINGS if config.tie_embeddings else HEAD
    yield Slot(("head",), {head: (config.vocab_size, config.hidden_size)}, Transposed())


def _norm(name: str, stored: str, size: int) -> Slot:
    return Slot((name, "scale"), {f"{stored}.weight": (size,)}, AsStored())


def _attention(config: DecoderConfig) -> Iterator[Slot]:
    """The parameters of a layer's attention branch."""
    hidden, size, group = config.hidden_size, config.head_dim, config.num_heads // config.num_kv_heads
    rows = dict(zip("qkv", (config.num_heads * size, *(2 * (config.num_kv_heads * size,))), strict=True))
    grouped = Grouped(config.num_kv_heads, (group * size, size, size))
    yield _norm("attention_norm", "input_layernorm", hidden)
    yield Slot(("qkv",), {f"self_attn.{role}_proj.weight": (count, hidden) for role, count in rows.items()}, grouped)
    if config.traits.qkv_bias:
        yield Slot(("qkv_bias",), {f"self_attn.{role}_proj.bias": (count,) for role, count in rows.items()}, grouped)
    if config.traits.qk_norm:
        yield from (_norm(f"{role}_norm", f"self_attn.{role}_norm", size) for role in "qk")
    yield Slot(("out",), {"self_attn.o_proj.weight": (hidden, config.num_heads * size)}, Transposed())
    if config.traits.post_norms:
        yield _norm("post_attention_norm", "post_attention_layernorm", hidden)


def _mlp(config: DecoderConfig) -> Iterator[Slot]:
    """The parameters of a layer's MLP branch."""
    hidden, inner, post_norms = config.hidden_size, config.intermediate_size, config.traits.post_norms
    # Without norms behind the branches, the norm between them is the one after attention.
    yield _norm("mlp_norm", "pre_feedforward_layernorm" if post_norms else "post_attention_layernorm", hidden)
    yield Slot(("gate_up",), {f"mlp.{role}_proj.weight": (inner, hidden) for role in ("gate", "up")}, Stacked())
    yield Slot(("down",), {"mlp.down_proj.weight": (hidden, inner)}, Transposed())
    if post_norms:
        yield _norm("post_mlp_norm", "post_feedforward_layernorm", hidden)
