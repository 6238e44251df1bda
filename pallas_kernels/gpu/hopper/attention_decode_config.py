"""Launch settings of the Hopper decode kernel, and which calls it takes; no kernel is imported for either.

The rows of one thread block are the T new tokens of a batch row times the G query heads that share a key/value head.
Rows are stored in groups of eight, as shared memory is swizzled: either the heads of a token, or the tokens of a head,
are padded to a multiple of eight, whichever takes fewer rows.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from pallas_kernels.launch import cdiv, round_up

TILE = 64  # rows of one warpgroup's matrix product
LANES = 128  # threads of a warpgroup
MAX_CLUSTER = 16  # thread blocks of a cluster
PADDING = 8  # numbers between two rows of u in a cluster, so that rows stored together lie in different banks
MAX_ROWS = 256
HEAD_SIZES = (64, 128, 256)
PAGE_MULTIPLE = 16
MAX_TOKENS = 16
NOWHERE = 2**30  # the position of a slot that holds none: past every query
SHARED_BYTES = 228 * 1024  # of a multiprocessor
BLOCK_OVERHEAD = 2 * 1024  # of a thread block: barriers, and what the chip reserves


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Static sizes of a call, and how its rows are packed.

    Args:
      B, T, S, N, K, H: batch, new tokens, key slots, query heads, key/value heads, head size.
      page: positions in a page; None for a cache that is not paged.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    page: int | None = None

    @property
    def G(self) -> int:
        """Query heads of a key/value head."""
        return self.N // self.K

    @property
    def heads_inside(self) -> bool:
        """Whether row t * stride + g holds token t of head g; else row g * stride + t does."""
        return self.T * round_up(self.G, 8) <= self.G * round_up(self.T, 8)

    @property
    def stride(self) -> int:
        """Rows between two groups, a multiple of eight."""
        return round_up(self.G if self.heads_inside else self.T, 8)

    @property
    def groups(self) -> int:
        """Groups of `stride` rows."""
        return self.T if self.heads_inside else self.G

    @property
    def rows(self) -> int:
        """Rows of a batch row and key/value head, padding included."""
        return self.groups * self.stride

    @property
    def tiles(self) -> int:
        """Warpgroups of a thread block, 64 rows each."""
        return cdiv(self.rows, TILE)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Launch settings.

    Args:
      block_keys: keys that are copied and multiplied at once.
      stages: blocks of keys and values that are in shared memory at once.
      programs: thread blocks that share the work; the best is what the chip holds at once.
      least_blocks: blocks that a program gets at least, where there are fewer than there are programs.
      merge_loads: partial results that a program of the merge reads at once.
      cluster: 1 for any number of parts of a row, which a second kernel merges; else programs that share a row and head
        and merge within the same kernel, and there are as many as rows, heads and this ask for.
    """

    block_keys: int = 128
    stages: int = 3
    programs: int = 132
    least_blocks: int = 2
    merge_loads: int = 16
    cluster: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("stages", 2, 16),
            ("programs", 1, 2**16),
            ("least_blocks", 1, 2**16),
            ("merge_loads", 1, 64),
            ("cluster", 1, MAX_CLUSTER),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"`{name}`: expected an integer in [{low}, {high}], got {value!r}")
        if self.block_keys not in (64, 128):
            raise ValueError(f"`block_keys`: expected 64 or 128, got {self.block_keys!r}")


class DecodeOperands(NamedTuple):
    """Arrays of a call; None where it has none.

    Args:
      query: [B, T, N, H].
      key, value: [B, S, K, H], or pages [pages, page, K, H] beside a page table.
      length: [B] int32, logical positions of each row.
      real: [B] int32, how many of the T tokens are real.
      page_table: [B, max_pages] int32.
      positions: [B, S] int32, the position in each slot of a ring, NOWHERE where it holds none.
      ancestors: [B, T] int32, bit j of token i says that it descends from new token j.
      oldest: [B, T] int32, the first position that a token of a tree sees.
      sinks: [N] float32.
    """

    query: Array
    key: Array
    value: Array
    length: Array
    real: Array | None = None
    page_table: Array | None = None
    positions: Array | None = None
    ancestors: Array | None = None
    oldest: Array | None = None
    sinks: Array | None = None


class DecodeCall(NamedTuple):
    """What is static about a call.

    Args:
      shape: its sizes.
      config: its launch settings.
      scale, soft_cap: of the scores.
      left: positions before its own that a token sees; None for all.
      split: blocks of a part, counted from the start of its row; None to cut wherever a program's share ends.
      statistics: whether m, l and u are wanted in place of an output.
      is_tree, is_ring: whether there are `ancestors`, and `positions`.
    """

    shape: DecodeShape
    config: DecodeConfig
    scale: float
    soft_cap: float | None = None
    left: int | None = None
    split: int | None = None
    statistics: bool = False
    is_tree: bool = False
    is_ring: bool = False

    @property
    def finishes(self) -> bool:
        """Whether a program that holds a whole row writes its output; vectors of two heads are merged packed."""
        return not self.statistics and self.shape.H >= LANES


def shared_bytes(shape: DecodeShape, config: DecodeConfig) -> int:
    """Bytes of shared memory of one thread block, for elements of two bytes."""
    keys_and_values = 2 * config.stages * config.block_keys
    rows = shape.tiles * TILE
    # A cluster keeps m, l and u in float32 for its programs to read, u in the query's place.
    query = 2 * shape.H if config.cluster == 1 else 4 * (shape.H + PADDING + 2)
    return keys_and_values * shape.H * 2 + rows * query + BLOCK_OVERHEAD


def config_refusals(shape: DecodeShape, config: DecodeConfig) -> tuple[str, ...]:
    """Why these settings are not legal for a call; empty when they are."""
    used, blocks = shared_bytes(shape, config), cdiv(shape.S, config.block_keys)
    rules = (
        (used > SHARED_BYTES, f"{used} bytes of shared memory are more than {SHARED_BYTES}"),
        (config.cluster > 1 and shape.H < LANES, f"clusters take head sizes of {LANES} and more, not {shape.H}"),
        (config.cluster > blocks, f"a cluster of {config.cluster} is more than the {blocks} blocks of a row"),
    )
    return tuple(reason for refused, reason in rules if refused)


CLUSTERS: tuple[int, ...] = (8,)  # sizes that the heuristic may take, the best first
CLUSTER_SLOTS = 4096  # slots of the longest cache that takes them; longer ones have not been timed
CLUSTER_KEYS = 64  # keys of a block there: a short cache has too few larger ones


def cluster_size(shape: DecodeShape, cores: int) -> int:
    """Programs of a cluster where one launch with clusters is taken for faster than two without; 1 elsewhere.

    All clusters have to run at once, or the last ones would wait while most of the chip is idle.
    """
    if shape.S > CLUSTER_SLOTS:
        return 1
    pairs = shape.B * shape.K
    configs = (DecodeConfig(CLUSTER_KEYS, stages=2, cluster=size) for size in CLUSTERS if pairs * size <= cores)
    return next((config.cluster for config in configs if not config_refusals(shape, config)), 1)


def heuristic(shape: DecodeShape, cores: int, *, pinned: bool = False) -> DecodeConfig:
    """Settings for a call on a chip of `cores` multiprocessors, with as many stages as fit: clusters, or one program
    on each.

    Blocks of 128 keys take the registers of 64 rows times 128 scores, which a program of up to two warpgroups has.

    Args:
      shape: of the call.
      cores: multiprocessors.
      pinned: whether the parts of a row are given; those of a cluster follow from its size, which follows from B.
    """
    cluster = 1 if pinned else cluster_size(shape, cores)
    if cluster > 1:
        return _deep(shape, DecodeConfig(CLUSTER_KEYS, cluster=cluster))
    keys = 128 if shape.tiles <= 2 and shape.H <= 128 and shape.S >= 128 else 64
    return _deep(shape, DecodeConfig(keys, programs=cores))


def _deep(shape: DecodeShape, config: DecodeConfig) -> DecodeConfig:
    """The same with as many stages as fit: up to six, and no more than a program of a cluster can have blocks."""
    stage = 4 * config.block_keys * shape.H
    free = SHARED_BYTES - shared_bytes(shape, config) + config.stages * stage
    most = 6 if config.cluster == 1 else min(6, cdiv(cdiv(shape.S, config.block_keys), config.cluster))
    return dataclasses.replace(config, stages=max(2, min(most, free // stage)))


def candidates(shape: DecodeShape, cores: int) -> tuple[DecodeConfig, ...]:
    """Legal settings worth timing, the heuristic's first."""
    first = heuristic(shape, cores)
    alone = heuristic(shape, cores, pinned=True)
    others = (
        dataclasses.replace(alone, block_keys=keys, stages=stages, programs=programs)
        for keys in (64, 128)
        for stages in range(2, 7)
        for programs in (cores, 2 * cores)
    )
    clusters = (
        _deep(shape, DecodeConfig(keys, cluster=size))
        for keys in (64, 128)
        for size in (2, 4, 8, 16)
        if shape.B * shape.K * size <= 2 * cores
    )
    every = (first, *others, *clusters)
    return tuple(dict.fromkeys(config for config in every if not config_refusals(shape, config)))


def refusals(shape: DecodeShape, *, itemsize: int, value_size: int) -> tuple[str, ...]:
    """Why the kernel cannot take a call; empty when it can.

    Args:
      shape: of the call.
      itemsize: bytes of an element.
      value_size: head size of the values.
    """
    slots = shape.S if shape.page is None else 8
    rules = (
        (itemsize != 2, f"takes elements of two bytes (bfloat16, float16), not of {itemsize}"),
        (value_size != shape.H, f"takes one head size only, not H = {shape.H} and Hv = {value_size}"),
        (shape.H not in HEAD_SIZES, f"takes head sizes 64, 128 and 256, not {shape.H}"),
        (not 1 <= shape.T <= MAX_TOKENS, f"takes 1 to {MAX_TOKENS} new tokens, not {shape.T}"),
        (shape.rows > MAX_ROWS, f"takes {MAX_ROWS} rows of tokens times heads of a group, not {shape.rows}"),
        (shape.B < 1, "takes no empty batch"),
        (shape.S < TILE, f"takes caches of at least {TILE} slots, not {shape.S}"),
        (slots % 8 != 0, f"takes caches of a multiple of 8 slots, not {shape.S}"),
        (
            shape.page is not None and shape.page % PAGE_MULTIPLE != 0,
            f"takes pages whose size is a multiple of {PAGE_MULTIPLE}, not {shape.page}",
        ),
    )
    return tuple(reason for refused, reason in rules if refused)
