"""Calls of attention that experiments time, their operands, and the float32 results that they are checked against."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.attention import dot_product_attention

CLOSE = 1e-2  # relative distance of a result in bfloat16 from one in float32


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes (see `flashspec.dims`), and what hides pairs.

    Attributes:
      window: positions that a query sees on each side besides its own.
      documents: lengths of the documents that are packed into every row; none sees another.
    """

    B: int
    T: int
    N: int
    K: int
    H: int
    is_causal: bool = False
    window: tuple[int, int] | None = None
    documents: tuple[int, ...] = ()

    def __str__(self) -> str:
        heads = f"N{self.N}" if self.N == self.K else f"N{self.N} K{self.K}"
        parts = [f"B{self.B} T{self.T} {heads} H{self.H}", "causal" if self.is_causal else "full"]
        parts += [f"window {self.window}"] if self.window else []
        return " ".join([*parts, *([f"{len(self.documents)} documents"] if self.documents else [])])

    @property
    def options(self) -> dict[str, Any]:
        """Of `dot_product_attention`."""
        ids = {} if not self.documents else dict.fromkeys(("q_segment_ids", "kv_segment_ids"), self.segment_ids)
        return {"is_causal": self.is_causal, "window": self.window, **ids}

    @property
    def segment_ids(self) -> np.ndarray:
        """int32 [B, T], the document of each position."""
        row = np.repeat(np.arange(len(self.documents), dtype=np.int32), self.documents)
        return np.broadcast_to(row, (self.B, self.T))

    @property
    def flops(self) -> float:
        """Multiplications and additions of the forward's two products, over the pairs that are visible."""
        pairs = sum(length * length for length in self.documents or (self.T,)) / (2 if self.is_causal else 1)
        if self.window is not None:
            pairs = self.T * (self.window[0] + 1)
        return 4 * self.B * self.N * pairs * self.H

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of query, key, value and the gradient of the output."""
        heads = (self.N, self.K, self.K, self.N)
        return tuple(jax.ShapeDtypeStruct((self.B, self.T, n, self.H), jnp.bfloat16) for n in heads)


def forward(attend: Callable[..., jax.Array], case: Case) -> Callable[..., Any]:
    """The call itself: a function of query, key and value."""
    return lambda query, key, value: attend(query, key, value, case)


def gradients(attend: Callable[..., jax.Array], case: Case) -> Callable[..., Any]:
    """Forward and backward: the gradients of query, key and value for a cotangent, the fourth operand."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        _, pull = jax.vjp(forward(attend, case), query, key, value)
        return pull(cotangent)

    return call


def ours(implementation: Any = None) -> Callable[..., jax.Array]:
    """This library's call of a case."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, case: Case) -> jax.Array:
        return dot_product_attention(query, key, value, **case.options, implementation=implementation)

    return attend


def operands(case: Case, seed: int, count: int) -> list[jax.Array]:
    """The first `count` of query, key, value and the gradient of the output: normal numbers."""
    keys = jax.random.split(jax.random.key(seed), count)
    return [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, case.shapes, strict=False)]


def part(case: Case, arrays: list[Any]) -> list[Any]:
    """The last batch row and last key/value head of arrays [B, length, heads, size], with the heads that read it."""
    return [x[-1:, :, -max(1, x.shape[2] // case.K) :] for x in arrays]


def oracle(case: Case, direction: Any, arrays: list[jax.Array]) -> list[Any]:
    """Results for the last row's last group of heads, computed blockwise in float32."""
    alone = dataclasses.replace(case, B=1)
    few = [x.astype(jnp.float32) for x in part(case, arrays)]
    return jax.tree.leaves(jax.jit(direction(ours("blockwise"), alone))(*few))


@jax.jit
def _distances(got: list[jax.Array], want: list[jax.Array]) -> list[jax.Array]:
    pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(got, want, strict=True)]
    return [jnp.sqrt(jnp.sum((x - y) ** 2) / jnp.sum(y**2)) for x, y in pairs]


def distance(got: list[Any], want: list[Any]) -> float:
    """The largest relative distance of a pair of arrays in the Euclidean norm; NaN where there is one."""
    return float(np.max(np.asarray(_distances(got, want))))
