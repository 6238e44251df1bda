"""What is static about the fused decoder step on Hopper: sizes, settings, and what the kernel takes.

No kernel is imported here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS, Split
from pallas_kernels.launch import cdiv, round_up

PRODUCTS = ("out", "gate_up", "down", "qkv")
PHASES = ("attend", "merge", *PRODUCTS)  # of a layer, from its queries to those of the next
ADDING = ("out", "down")  # products that are added to the residual stream
MAX_ROWS = 16
QUERY_TILE = 64  # packed queries of a key/value head at most
ROWS_MULTIPLE = 8  # of the tokens' side of a matrix product
TOGETHER = 4  # rows that a warpgroup does small work on, one in each warp
COLUMNS = 128  # that it does at once
COUNTS = (len(PHASES), 512)  # of each phase, int32 numbers for its sets
SHARED_BYTES = 227 * 1024  # of a thread block at most
HEAD_SIZES = (64, 128, 256)
ATTENDED_HEAD_SIZES = (64, 128)


class Heads(NamedTuple):
    """How the columns of a product are heads: of each key/value head its G query heads, its key, its value.

    Args:
      K: key/value heads.
      G: query heads of each.
      H: head size.
    """

    K: int
    G: int
    H: int


@dataclasses.dataclass(frozen=True)
class AttentionForm:
    """What is static about attention, where a step has it: causal, over a dense cache.

    Args:
      tokens: T, of a batch row; the rows of a step are those of one batch row after the other.
      slots: of a cache.
      scale: of the scores.
    """

    tokens: int
    slots: int
    scale: float


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """Static sizes of a step.

    Args:
      rows: tokens.
      hidden: of the residual stream.
      inner: of the gated MLP.
      heads: of attention.
    """

    rows: int
    hidden: int
    inner: int
    heads: Heads

    def matrix(self, product: str) -> tuple[int, int]:
        """Inputs and outputs of a product."""
        K, G, H = self.heads
        sizes = {
            "out": (K * G * H, self.hidden),
            "gate_up": (self.hidden, 2 * self.inner),
            "down": (self.inner, self.hidden),
            "qkv": (self.hidden, K * (G + 2) * H),
        }
        return sizes[product]

    def split(self, product: str, config: "BlockConfig") -> Split:
        """How a product is shared out."""
        together = {"gate_up": 2, "qkv": cdiv(self.heads.H, BLOCK_OUTPUTS)}.get(product, 1)
        sizes = *self.matrix(product), config.block_inputs, config.programs
        return Split(*sizes, together, apart=product == "gate_up")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Launch settings.

    Args:
      programs: thread blocks that share the work. They wait for each other, so each needs a multiprocessor of its own:
        at most as many as the chip has, and the best is all of them.
      block_inputs: rows of a matrix that are copied and multiplied at once.
      stages: blocks in shared memory at once.
    """

    programs: int
    block_inputs: int = 128
    stages: int = 6

    def __post_init__(self) -> None:
        for name, low, high in (("programs", 1, 2**16), ("stages", 2, 32)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"`{name}`: expected an integer in [{low}, {high}], got {value!r}")
        if self.block_inputs not in (64, 128):
            raise ValueError(f"`block_inputs`: expected 64 or 128, got {self.block_inputs!r}")


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """What is static about a call.

    Args:
      shape: its sizes.
      config: its launch settings.
      phases: those of a call, neighbours in `PHASES`. The first two come together, before a product, and only where
        there is `attention`.
      eps: of all norms.
      unit_offset: whether norms multiply by 1 + scale.
      activation: elementwise, on float32.
      biased: whether queries, keys and values have a bias.
      head_norms: whether queries and keys are normalised.
      attention: the same for all calls of a step; None where attention is computed elsewhere.
    """

    shape: BlockShape
    config: BlockConfig
    phases: tuple[str, ...]
    eps: float
    unit_offset: bool
    activation: Callable[[Array], Array]
    biased: bool = False
    head_norms: bool = False
    attention: AttentionForm | None = None

    def __post_init__(self) -> None:
        line = PRODUCTS if self.attention is None else PHASES
        first = line.index(self.phases[0]) if self.phases and self.phases[0] in line else 0
        whole = self.phases and self.phases[0] != "merge" and self.phases[-1] not in PHASES[:2]
        if not whole or self.phases != line[first : first + len(self.phases)]:
            raise ValueError(f"`phases`: expected neighbours in {line}, got {self.phases!r}")

    @property
    def splits(self) -> tuple[Split | None, ...]:
        """How the product of each phase is shared out; None for one that is no product."""
        return tuple(self.split(name) if name in PRODUCTS else None for name in self.phases)

    def split(self, product: str) -> Split:
        """How a product is shared out."""
        return self.shape.split(product, self.config)

    @property
    def padded(self) -> int:
        """Rows that are multiplied."""
        return round_up(self.shape.rows, ROWS_MULTIPLE)

    @property
    def row_groups(self) -> int:
        """Groups of rows of the small work."""
        return cdiv(self.shape.rows, TOGETHER)

    @property
    def tokens(self) -> int:
        """T of a batch row, by which queries are packed; 1 where attention is elsewhere."""
        return 1 if self.attention is None else self.attention.tokens

    @property
    def query(self) -> tuple[int, int, int, int]:
        """Of the packed queries: batch rows, key/value heads, T G rounded up as a copy takes it, head size."""
        K, G, H = self.shape.heads
        packed = self.tokens * G
        return self.shape.rows // self.tokens, K, packed if self.attention is None else round_up(packed, 8), H

    @property
    def registers(self) -> tuple[int | None, int | None]:
        """Of a thread that computes and of one that copies; None where what all have suffices."""
        return (None, None) if self.attention is None else (208, 40)

    def rotation(self, number: int) -> int:
        """The program that is the first of a product: one after the last of those that did a block more before."""
        return sum(split.share[1] for split in self.splits[:number] if split) % self.config.programs

    def added(self, number: int) -> int:
        """How many products before one are added to the residual stream."""
        return sum(name in ADDING for name in self.phases[:number])


class Places(NamedTuple):
    """Where the new tokens of a step go, and how they are turned.

    Args:
      lead, slot: [rows] int32, indices into the first two axes of a cache; a write past either is dropped.
      cos, sin: [rows, H / 2] float32, of the angle of each pair of coordinates i and i + H / 2.
    """

    lead: Any
    slot: Any
    cos: Any
    sin: Any


class BlockOperands(NamedTuple):
    """Arrays of a call; None, or fewer of them, where it has no use for one.

    Args:
      x: [rows, inputs] what the first phase multiplies if it is a product, bfloat16 like all weights.
      weights: for each phase a matrix [inputs, outputs], or None for one that is no product.
      residual: [row_groups * 4, hidden]; what rows past the last hold is of no matter.
      scales: [hidden] of the norm after each product that is added, where another product follows.
      places: of the rows.
      bias: [K (G + 2) H].
      head_scales: of queries and of keys, [H].
      query: packed as `BlockPlan.query` says, where a call begins with attention.
      lengths: int32 [2, B], where a call attends: what each batch row held before the step, and holds with its tokens.
      attended: references to the keys and values of the layer of a cache that is attended to, [leads, slots, K, H].
      written: and of the layer that new ones are written to.
      counts: a reference to int32 `COUNTS`, zeros before the first call of a step, and the same for all its calls.
    """

    x: Any = None
    weights: tuple[Any, ...] = ()
    residual: Any = None
    scales: tuple[Any, ...] = ()
    places: Any = None
    bias: Any = None
    head_scales: tuple[Any, ...] = ()
    query: Any = None
    lengths: Any = None
    attended: tuple[Any, ...] = ()
    written: tuple[Any, ...] = ()
    counts: Any = None


def shared_bytes(shape: BlockShape, config: BlockConfig, attends: bool = False) -> int:
    """Bytes of shared memory of one thread block."""
    stage = 2 * config.block_inputs * (BLOCK_OUTPUTS + round_up(shape.rows, ROWS_MULTIPLE))
    return config.stages * stage + attends * 2 * QUERY_TILE * shape.heads.H + 1024


def heuristic(shape: BlockShape, cores: int, attends: bool = False) -> BlockConfig:
    """Settings on a chip of `cores` multiprocessors: one program on each, as many stages as fit."""
    one, two = (shared_bytes(shape, BlockConfig(cores, stages=stages), attends) for stages in (2, 3))
    return BlockConfig(cores, stages=2 + (SHARED_BYTES - one) // (two - one))


def unit_keys(shape: BlockShape, config: BlockConfig) -> int:
    """Keys whose values, with them, fill the memory of a block of weights."""
    return config.block_inputs * BLOCK_OUTPUTS // (2 * shape.heads.H)


def refusals(
    shape: BlockShape,
    config: BlockConfig,
    dtype: str,
    products: tuple[str, ...] = PRODUCTS,
    attention: AttentionForm | None = None,
) -> tuple[str, ...]:
    """Why the kernel cannot take a call with some products, and attention if that is given; empty when it can."""
    used = shared_bytes(shape, config, attention is not None)
    rules = [
        # The factor of a norm is applied behind a product: a float16 might overflow in front of it.
        (dtype != "bfloat16", f"computes in bfloat16, not in {dtype}"),
        (not 1 <= shape.rows <= MAX_ROWS, f"takes 1 to {MAX_ROWS} rows, not {shape.rows}"),
        (shape.heads.H not in HEAD_SIZES, f"takes heads of {HEAD_SIZES}, not of {shape.heads.H}"),
        (shape.inner % COLUMNS > 0, f"takes an MLP of a multiple of {COLUMNS}, not of {shape.inner}"),
        (used > SHARED_BYTES, f"{used} bytes of shared memory are more than {SHARED_BYTES}"),
    ]
    for product in products:
        inputs, outputs = shape.matrix(product)
        whole = inputs % config.block_inputs == 0 and outputs % BLOCK_OUTPUTS == 0
        multiples = f"multiples of {config.block_inputs} inputs and {BLOCK_OUTPUTS} outputs"
        rules.append((not whole, f"takes {multiples}, not a product {product} of {inputs} x {outputs}"))
        split = shape.split(product, config)
        counted = f"counts {COUNTS[1]} sets of tiles of a product, not {split.sets} of {product}"
        rules.append((whole and split.sets > COUNTS[1], counted))
    if attention is not None:
        rules += _attention_rules(shape, config, attention)
    return tuple(reason for refused, reason in rules if refused)


def _attention_rules(shape: BlockShape, config: BlockConfig, attention: AttentionForm) -> list[tuple[bool, str]]:
    K, G, H = shape.heads
    packed, keys = attention.tokens * G, unit_keys(shape, config)
    return [
        (H not in ATTENDED_HEAD_SIZES, f"attends by heads of {ATTENDED_HEAD_SIZES}, not of {H}"),
        (packed > QUERY_TILE, f"packs {QUERY_TILE} queries of a key/value head at most, not {packed}"),
        (G * H % COLUMNS > 0, f"attends where {COLUMNS} columns are of one key/value head, not with {G} heads of {H}"),
        (attention.slots < keys, f"attends over caches of {keys} slots at least, not {attention.slots}"),
        (COUNTS[1] < K, f"counts {COUNTS[1]} key/value heads, not {K}"),
    ]
