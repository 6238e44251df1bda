"""What is static about the fused decoder step on Hopper: sizes, settings, and what the kernel takes.

No kernel is imported here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS, Split
from pallas_kernels.launch import cdiv, round_up

PRODUCTS = ("out", "gate_up", "down", "qkv")
PHASES = ("qkv", "attend", "merge", "out", "gate_up", "down")  # of a layer
BEFORE = dict(zip(PHASES, (*PHASES[-1:], *PHASES[:-1]), strict=True))  # what each phase goes on from
ADDING = ("out", "down")  # products that are added to the residual stream
MAX_ROWS = 16
QUERY_TILE = 64  # packed queries of a key/value head at most
ROWS_MULTIPLE = 8  # of the tokens' side of a matrix product
KEYS_MULTIPLE = 64  # of the inputs of one whose weights are keys or values
TOGETHER = 4  # rows that a warpgroup does small work on, one in each warp
COLUMNS = 128  # that it does at once
WARP = 32
LAYERS = (
    4  # of a call at most: with every array more to copy from, the compiler takes longer, and more than in proportion
)
REGISTERS = 208, 40  # of a thread that computes, and of one that copies
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
      in_flight: blocks that are on their way to it at once. A multiprocessor's share of the memory's speed takes about
        two; more of them are a queue, in which everything else that it waits for comes last.
    """

    programs: int
    block_inputs: int = 128
    stages: int = 6
    in_flight: int = 2

    def __post_init__(self) -> None:
        for name, low, high in (("programs", 1, 2**16), ("stages", 2, 32), ("in_flight", 1, self.stages)):
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
      phases: those of a call: neighbours in `PRODUCTS`, or all `PHASES` where there is `attention`.
      eps: of all norms.
      unit_offset: whether norms multiply by 1 + scale.
      activation: elementwise, on float32.
      biased: whether queries, keys and values have a bias.
      head_norms: whether queries and keys are normalised.
      attention: None where it is computed elsewhere.
      layers: that a call takes, one after the other, where there is attention.
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
    layers: int = 1

    def __post_init__(self) -> None:
        if self.attention is not None and self.phases != PHASES:
            raise ValueError(f"`phases`: expected {PHASES}, got {self.phases!r}")
        first = PRODUCTS.index(self.phases[0]) if self.phases and self.phases[0] in PRODUCTS else 0
        if self.attention is None and (not self.phases or self.phases != PRODUCTS[first : first + len(self.phases)]):
            raise ValueError(f"`phases`: expected neighbours in {PRODUCTS}, got {self.phases!r}")
        if self.layers < 1 or (self.layers > 1 and self.attention is None):
            raise ValueError(f"`layers`: expected 1, or more with attention, got {self.layers!r}")

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

    def rotation(self, number: int) -> int:
        """The program that is the first of a product: one after the last of those that did a block more before.

        Args:
          number: of the product's phase; that of all phases gives the first program of the next layer.
        """
        return sum(split.share[1] for split in self.splits[:number] if split) % self.config.programs

    def is_given(self, number: int) -> bool:
        """Whether what a phase multiplies is given with the call, and not made by a phase before."""
        return self.attention is None and number == 0

    def added_before(self, number: int) -> bool:
        """Whether something is added to the residual stream within the call before a phase, or is by a call before."""
        return self.attention is not None or any(name in ADDING for name in self.phases[:number])


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


class Begin(NamedTuple):
    """References to where a call with attention begins and ends: what is before, and is left behind its last layer.

    Args:
      residual: [row_groups * 4, hidden]; what rows past the last hold is of no matter.
      rows: [padded rows, hidden], the residual times the scale of the next norm.
    """

    residual: Any
    rows: Any


class BlockOperands(NamedTuple):
    """Arrays of a call; None, or fewer of them, where it has no use for one.

    Args:
      x: [rows, inputs] what the first phase multiplies, bfloat16 like all weights; without attention.
      weights: for each phase the matrices [inputs, outputs] of all layers; of a phase that is no product, none.
      residual: as in `Begin`; without attention.
      scales: [layers, hidden] of the norm after each product that is added, in a dict by that product's name; like
        `bias` and `head_scales` of all layers of a step, where a call attends.
      places: of the rows.
      bias: [layers, K (G + 2) H].
      head_scales: of queries and of keys, [layers, H].
      lengths: int32 [2, B], where a call attends: what each batch row held before the step, and holds with its tokens.
      begin: where a call attends.
      first: int32 [1], which layer of a step the call's first is; where it attends.
      caches: of each layer, references to the keys and values that new ones are written to, [leads, slots, K, H].
      counts: a reference to int32 `COUNTS`, zeros at first, for each call that does not attend and for all of a step
        that do.
      letters: a reference to int32 [letters, 2], as `decode_block_letters_config.letters_of` the plan has them:
        zeros, but that the squares of `down` are those of what `begin` holds, of turn 1; for calls as `counts`.
    """

    x: Any = None
    weights: tuple[tuple[Any, ...], ...] = ()
    residual: Any = None
    scales: Any = None
    places: Any = None
    bias: Any = None
    head_scales: tuple[Any, ...] = ()
    lengths: Any = None
    first: Any = None
    begin: Begin | None = None
    caches: tuple[tuple[Any, Any], ...] = ()
    counts: Any = None
    letters: Any = None


def beginning(plan: BlockPlan, dtype: Any) -> Begin:
    """Shapes and types of where a call with attention begins and ends."""
    hidden = plan.shape.hidden
    return Begin(
        jax.ShapeDtypeStruct((plan.row_groups * TOGETHER, hidden), dtype),
        jax.ShapeDtypeStruct((plan.padded, hidden), dtype),
    )


def shared_bytes(shape: BlockShape, config: BlockConfig, attends: bool = False) -> int:
    """Bytes of shared memory of one thread block."""
    stage = 2 * config.block_inputs * (BLOCK_OUTPUTS + round_up(shape.rows, ROWS_MULTIPLE))
    return config.stages * stage + attends * 2 * QUERY_TILE * shape.heads.H + 1024


def heuristic(shape: BlockShape, cores: int, attends: bool = False) -> BlockConfig:
    """Settings on a chip of `cores` multiprocessors: one program on each, as many stages as fit."""
    one, two = (shared_bytes(shape, BlockConfig(cores, stages=stages), attends) for stages in (2, 3))
    return BlockConfig(cores, stages=max(2, 2 + (SHARED_BYTES - one) // (two - one)))


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
        (keys % KEYS_MULTIPLE > 0, f"attends by {KEYS_MULTIPLE} keys at once, not by {keys}"),
        (attention.slots < keys, f"attends over caches of {keys} slots at least, not {attention.slots}"),
        (COUNTS[1] < K, f"counts {COUNTS[1]} key/value heads, not {K}"),
    ]
