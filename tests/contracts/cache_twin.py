"""A cache in plain Python: rows are lists of tokens, and each layout says which of them it still holds.

A token stands for its keys and values: `encode` spreads it over heads, sizes and layers, so that a misplaced write
of any kind changes what is read back.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.attention.views import gather
from flashspec.cache import append, rollback, view

K, H, HV = 2, 3, 2


@dataclasses.dataclass
class Twin:
    """Every row as the list of its tokens, and what a layout has lost of it."""

    batch: int

    def __post_init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(self.batch)]
        self.starts = [0] * self.batch

    def append(self, tokens: np.ndarray, counts: np.ndarray) -> None:
        for b, row in enumerate(self.rows):
            self.starts[b] = len(row)
            row.extend(int(token) for token in tokens[b, : counts[b]])
        self.grown()

    def rollback(self, lengths: np.ndarray) -> None:
        for b, row in enumerate(self.rows):
            del row[int(lengths[b]) :]
            self.starts[b] = len(row)
        self.shrunk()

    def grown(self) -> None: ...

    def shrunk(self) -> None: ...

    def held(self, b: int) -> range:
        """The positions of row b that the cache must hold now."""
        return range(len(self.rows[b]))

    def overflow(self, b: int) -> bool:
        return False


@dataclasses.dataclass
class DenseTwin(Twin):
    capacity: int

    def held(self, b: int) -> range:
        return range(min(len(self.rows[b]), self.capacity))

    def overflow(self, b: int) -> bool:
        return len(self.rows[b]) > self.capacity


@dataclasses.dataclass
class WindowTwin(Twin):
    left: int
    slots: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ring: list[dict[int, int]] = [{} for _ in range(self.batch)]
        self.lost = [False] * self.batch

    def grown(self) -> None:
        for b, row in enumerate(self.rows):
            self.ring[b] |= {i % self.slots: i for i in range(self.starts[b], len(row))}

    def shrunk(self) -> None:
        for b, row in enumerate(self.rows):
            self.ring[b] = {slot: i for slot, i in self.ring[b].items() if i < len(row)}
            seen = set(range(max(0, len(row) - self.left), len(row)))
            self.lost[b] = bool(row) and (self.lost[b] or not seen <= set(self.ring[b].values()))

    def held(self, b: int) -> range:
        """What the first query of the last append sees, and all that followed."""
        return range(0) if self.lost[b] else range(max(0, self.starts[b] - self.left), len(self.rows[b]))

    def overflow(self, b: int) -> bool:
        return self.lost[b]


@dataclasses.dataclass
class PagedTwin(Twin):
    page: int
    pages: int
    most: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count = [0] * self.batch

    def grown(self) -> None:
        for b, row in enumerate(self.rows):
            if self.starts[b] <= self.count[b] * self.page:
                wanted = min(-(-len(row) // self.page), self.most)
                free = self.pages - sum(self.count)
                self.count[b] += max(0, min(wanted - self.count[b], free))

    def shrunk(self) -> None:
        self.count = [min(n, -(-len(row) // self.page)) for n, row in zip(self.count, self.rows, strict=True)]

    def held(self, b: int) -> range:
        return range(min(len(self.rows[b]), self.count[b] * self.page))

    def overflow(self, b: int) -> bool:
        return len(self.rows[b]) > self.count[b] * self.page


def encode(tokens: Any, layer: int, size: int) -> Any:
    """[B, T] int32 -> [B, T, K, size] float32; exact, and different for every token, layer, head and component."""
    place = (np.arange(K)[:, None] * 8 + np.arange(size)[None, :] + 64 * layer).astype(np.float32)[None, None]
    return tokens.astype(np.float32)[..., None, None] * np.float32(1024) + place


@jax.jit
def append_all(cache: Any, tokens: jax.Array, counts: jax.Array) -> Any:
    """One forward: every layer appended in order."""
    for layer in range(len(cache.key)):
        cache = append(cache, layer, encode(tokens, layer, H), -encode(tokens, layer, HV), counts)
    return cache


rollback_all = jax.jit(rollback)


def with_nan(cache: Any) -> Any:
    """The cache with every buffer full of NaN, as memory that nobody has written may be."""
    key, value = (jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), part) for part in (cache.key, cache.value))
    return dataclasses.replace(cache, key=key, value=value)


def live(cache: Any, layer: int, b: int) -> dict[int, tuple[bytes, bytes]]:
    """Position -> bytes of key and of value, of everything that the view calls valid."""
    key, value, positions, valid = (None if x is None else np.asarray(x) for x in gather(view(cache, layer)))
    if positions is not None:
        assert positions[b].max() < int(cache.length[b]), "a slot keeps a position that was rolled back"
    slots = np.flatnonzero(valid[b])
    where = slots if positions is None else positions[b, slots]
    assert len(set(where.tolist())) == len(slots), "two slots hold one position"
    return {int(i): (key[b, s].tobytes(), value[b, s].tobytes()) for i, s in zip(where, slots, strict=True)}


def assert_holds(cache: Any, twin: Twin) -> None:
    """The cache holds what the twin says, bit for bit, in every layer, and flags the rows that have lost something."""
    assert np.asarray(cache.length).tolist() == [len(row) for row in twin.rows]
    assert np.asarray(cache.overflow).tolist() == [twin.overflow(b) for b in range(twin.batch)]
    for layer in range(len(cache.key)):
        for b, row in enumerate(twin.rows):
            found = live(cache, layer, b)
            assert twin.overflow(b) or set(found) <= set(range(len(row))), "a position that the row does not have"
            for i in twin.held(b):
                token = np.asarray([[row[i]]], np.int32)
                wanted = (encode(token, layer, H)[0, 0].tobytes(), (-encode(token, layer, HV))[0, 0].tobytes())
                assert found.get(i) == wanted, f"layer {layer}, row {b}, position {i}"


def play(cache: Any, twin: Twin, operations: list[tuple[str, Any]], check: Callable[[Any, Twin], None]) -> Any:
    """Run operations on both, checking after each: ("append", counts, T) and ("rollback", how far back, by row)."""
    cache, token = with_nan(cache), 1
    for name, amounts, *width in operations:
        amounts = np.asarray(amounts, np.int32)[: twin.batch]
        if name == "append":
            (new,) = width
            tokens = np.arange(token, token + twin.batch * new, dtype=np.int32).reshape(twin.batch, new)
            token += tokens.size
            counts = np.minimum(amounts, new)
            twin.append(tokens, counts)
            cache = append_all(cache, jnp.asarray(tokens), jnp.asarray(counts))
        else:
            lengths = np.maximum(np.asarray([len(row) for row in twin.rows], np.int32) - amounts, 0)
            twin.rollback(lengths)
            cache = rollback_all(cache, jnp.asarray(lengths))
        check(cache, twin)
    return cache
