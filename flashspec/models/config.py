"""The shape of a decoder: what `flashspec.models.decoder` computes, and nothing that it does not."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flashspec.checks import at_least, fail, one_of
from flashspec.models import hf_config
from flashspec.models.families import FAMILIES, Family
from flashspec.models.rotary import RopeScaling, positive


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Static description of a decoder-only transformer; hashable, so that it may be a static argument of `jax.jit`.

    Attributes:
      family: a key of `FAMILIES`.
      vocab_size: V.
      hidden_size: width of the residual stream.
      intermediate_size: width F of the gated MLP.
      num_layers: decoder layers.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads; divides N.
      head_dim: H, even (rotary pairs); N * H need not be `hidden_size`.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: added to the mean square inside the root.
      tie_embeddings: the output head is the transposed embedding.
      sliding_window: W as Hugging Face counts it, the query's own position included; None for no window.
      max_position_embeddings: context the model was trained for; a fact for users, not a limit.
      bos_token_id, eos_token_ids: ids for users of the model; no computation reads them.
      rope_scaling: how the rotary frequencies of full layers are lowered; None for not at all.
      local_rope_theta: base of the rotary frequencies of windowed layers; None for `rope_theta`, and its scaling.
      full_layers: layers that attend to the whole prefix though there is a window, in increasing order; indices past
        the last layer are dropped, so that a model cut to its first layers differs in `num_layers` alone.
      query_pre_attn_scalar: scores are scaled by its inverse root; None for `head_dim`.
      attention_soft_cap: c of c * tanh(score / c); None for none.
      final_soft_cap: the same for the logits.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    full_layers: tuple[int, ...] = ()
    query_pre_attn_scalar: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None

    def __post_init__(self) -> None:
        one_of("family", self.family, tuple(FAMILIES))
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            at_least(name, getattr(self, name), 1)
        at_least("head_dim", self.head_dim, 2)
        at_least("max_position_embeddings", self.max_position_embeddings, 1)
        for name in ("rope_theta", "rms_norm_eps"):
            positive(name, getattr(self, name))
        if not isinstance(self.tie_embeddings, bool):
            raise fail("tie_embeddings", "true or false", repr(self.tie_embeddings))
        for token in self.eos_token_ids:
            at_least("eos_token_ids", token, 0)
        if self.head_dim % 2:
            raise fail("head_dim", "an even size (rotary positions turn pairs)", self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise fail("num_heads", f"a multiple of num_kv_heads = {self.num_kv_heads}", self.num_heads)
        self._check_options()

    def _check_options(self) -> None:
        """Check what only some families have."""
        for name in ("sliding_window", "local_rope_theta", "full_layers", *_NUMBERS):
            if getattr(self, name) and name not in self.traits.options:
                raise fail(name, f"none for the family {self.family!r}", getattr(self, name))
        for name in ("local_rope_theta", *_NUMBERS):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.sliding_window is not None:
            at_least("sliding_window", self.sliding_window, 1)
        elif self.full_layers:
            raise fail("full_layers", "() without a sliding_window: every layer is full", self.full_layers)
        kept = tuple(sorted({at_least("full_layers", layer, 0) for layer in self.full_layers}))
        object.__setattr__(self, "full_layers", tuple(layer for layer in kept if layer < self.num_layers))

    @property
    def traits(self) -> Family:
        """What all members of the family share."""
        return FAMILIES[self.family]

    @property
    def windows(self) -> tuple[tuple[int, int] | None, ...]:
        """Each layer's window as (left, right) keys besides the query's own; Hugging Face's W is left = W - 1."""
        own = None if self.sliding_window is None else (self.sliding_window - 1, 0)
        return tuple(None if layer in self.full_layers else own for layer in range(self.num_layers))

    @property
    def window(self) -> tuple[int, int] | None:
        """The window that every layer has; None where some layer attends to its whole prefix."""
        return self.windows[0] if len(set(self.windows)) == 1 else None

    @property
    def rotations(self) -> tuple[tuple[float, RopeScaling | None], ...]:
        """Each layer's rotary base and scaling."""
        full = self.rope_theta, self.rope_scaling
        local = full if self.local_rope_theta is None else (self.local_rope_theta, None)
        return tuple(full if window is None else local for window in self.windows)

    @property
    def score_scale(self) -> float:
        """What scores q.k are multiplied by."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def num_parameters(self) -> int:
        """Parameters held, a tied head counted once."""
        traits, rows = self.traits, self.num_heads + self.num_kv_heads
        attention = 2 * rows * self.head_dim * self.hidden_size + (2 * self.head_dim if traits.qk_norm else 0)
        attention += (rows + self.num_kv_heads) * self.head_dim if traits.qkv_bias else 0
        norms = (4 if traits.post_norms else 2) * self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """The configuration that a parsed `config.json` describes.

        Raises:
          ValueError: the architecture is unknown, a size is missing, or an option changes the result and is not
            implemented; the message names it.
        """
        return cls(**hf_config.fields(values))

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The `config.json` of this configuration, with parameters stored in `dtype`."""
        return hf_config.document(self, dtype)


_NUMBERS = ("query_pre_attn_scalar", "attention_soft_cap", "final_soft_cap")
