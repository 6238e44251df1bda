"""Where each parameter of the decoder lies in a checkpoint: one table, which loading, checking and saving all read.

A weight is [outputs, inputs] in the file and [inputs, outputs] in the decoder, where weights that read the same input
are one array. A `Layout` joins the stored tensors into one array and splits it again; `turned` and `unturned` turn it.
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
    """How one parameter is made of stored tensors; hashable, so that layers of one shape share a compiled program.

    Attributes:
      turns: whether the parameter is what `join` gives with its last axis in front. Joining and turning are programs of
        their own: a transposition that a compiler fuses with anything else runs thirty times slower on a CPU.
    """

    def __hash__(self) -> int: ...

    @property
    def turns(self) -> bool: ...

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """The stored tensors, in order, as one array [..., inputs]."""

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """The stored tensors, in order, from what `join` gave."""

    def stored_spec(self, spec: Spec) -> Spec:
        """How each stored tensor has to be split so that it joins into `spec` and nothing moves between devices."""


@dataclasses.dataclass(frozen=True)
class Single:
    """One tensor: a weight, which is turned, or embeddings or a norm, which are not."""

    turns: bool

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        # On a CPU the tensor may be the file's own memory, which a parameter may not be.
        return tensors[0] if self.turns else jnp.array(tensors[0], copy=True)

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        return [array]

    def stored_spec(self, spec: Spec) -> Spec:
        return spec


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Weights [outputs, inputs] of one shape, [weights, outputs, inputs]."""

    turns: bool = True

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack(tensors)

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        return list(array)

    def stored_spec(self, spec: Spec) -> Spec:
        return spec[1:]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Query, key and value weights [heads * H, inputs], or biases [heads * H], with each key/value group contiguous.

    Attributes:
      kv_heads: K.
      group_rows: outputs of one key/value head's group in each tensor, (G * H, H, H).
      turns: whether they are weights.
    """

    kv_heads: int
    group_rows: tuple[int, int, int]
    turns: bool = True

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        grouped = [tensor.reshape(self.kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
        return jnp.concatenate(grouped, axis=1).reshape(-1, *tensors[0].shape[1:])

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        grouped = array.reshape(self.kv_heads, -1, *array.shape[1:])
        parts = np.split(grouped, np.cumsum(self.group_rows)[:-1], axis=1)
        return [part.reshape(-1, *array.shape[1:]) for part in parts]

    def stored_spec(self, spec: Spec) -> Spec:
        return spec


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


def turned(array: Any) -> Any:
    """Weights [..., inputs] as the decoder has them, [inputs, ...]."""
    return array.transpose(array.ndim - 1, *range(array.ndim - 1))


def unturned(array: Any) -> Any:
    """The opposite of `turned`."""
    return array.transpose(*range(1, array.ndim), 0)


def slots(config: DecoderConfig) -> Iterator[Slot]:
    """Every parameter of the decoder with its tensors in the file."""
    if not config.tie_embeddings:
        yield Slot(("embed",), {EMBEDDINGS: (config.vocab_size, config.hidden_size)}, Single(turns=False))
    for layer in range(config.num_layers):
        for slot in (*_attention(config), *_mlp(config)):
            shapes = {f"model.layers.{layer}.{name}": shape for name, shape in slot.shapes.items()}
            yield Slot(("layers", layer, *slot.path), shapes, slot.layout)
    yield Slot(("norm", "scale"), {"model.norm.weight": (config.hidden_size,)}, Single(turns=False))
    head = EMBEDDINGS if config.tie_embeddings else HEAD
    yield Slot(("head",), {head: (config.vocab_size, config.hidden_size)}, Single(turns=True))


def _norm(name: str, stored: str, size: int) -> Slot:
    return Slot((name, "scale"), {f"{stored}.weight": (size,)}, Single(turns=False))


def _attention(config: DecoderConfig) -> Iterator[Slot]:
    """The parameters of a layer's attention branch."""
    hidden, size, group = config.hidden_size, config.head_dim, config.num_heads // config.num_kv_heads
    rows = dict(zip("qkv", (config.num_heads * size, *(2 * (config.num_kv_heads * size,))), strict=True))
    grouped = Grouped(config.num_kv_heads, (group * size, size, size))
    yield _norm("attention_norm", "input_layernorm", hidden)
    yield Slot(("qkv",), {f"self_attn.{role}_proj.weight": (count, hidden) for role, count in rows.items()}, grouped)
    if config.traits.qkv_bias:
        biases: dict[str, tuple[int, ...]] = {f"self_attn.{role}_proj.bias": (count,) for role, count in rows.items()}
        yield Slot(("qkv_bias",), biases, dataclasses.replace(grouped, turns=False))
    if config.traits.qk_norm:
        yield from (_norm(f"{role}_norm", f"self_attn.{role}_norm", size) for role in "qk")
    yield Slot(("out",), {"self_attn.o_proj.weight": (hidden, config.num_heads * size)}, Single(turns=True))
    if config.traits.post_norms:
        yield _norm("post_attention_norm", "post_attention_layernorm", hidden)


def _mlp(config: DecoderConfig) -> Iterator[Slot]:
    """The parameters of a layer's MLP branch."""
    hidden, inner, post_norms = config.hidden_size, config.intermediate_size, config.traits.post_norms
    # Without norms behind the branches, the norm between them is the one after attention.
    yield _norm("mlp_norm", "pre_feedforward_layernorm" if post_norms else "post_attention_layernorm", hidden)
    yield Slot(("gate_up",), {f"mlp.{role}_proj.weight": (inner, hidden) for role in ("gate", "up")}, Stacked())
    yield Slot(("down",), {"mlp.down_proj.weight": (hidden, inner)}, Single(turns=True))
    if post_norms:
        yield _norm("post_mlp_norm", "post_feedforward_layernorm", hidden)
