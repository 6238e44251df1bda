"""What is static about the decoder step between two attentions on Hopper: sizes, settings, and what the kernel takes.

No kernel is imported here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS, Split
from pallas_kernels.launch import cdiv, round_up

PRODUCTS = ("out", "gate_up", "down", "qkv")
ADDING = ("out", "down")  # products that are added to the residual stream
MAX_ROWS = 16
ROWS_MULTIPLE = 8  # of the tokens' side of a matrix product
TOGETHER = 4  # rows that a warpgroup does small work on, one in each warp
COLUMNS = 128  # that it does at once
COUNTS = (len(PRODUCTS), 512)  # of each product, int32 numbers for its sets of tiles
SHARED_BYTES = 227 * 1024  # of a thread block at most
HEAD_SIZES = (64, 128, 256)


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
      products: those of a call, neighbours in `PRODUCTS`.
      eps: of all norms.
      unit_offset: whether norms multiply by 1 + scale.
      activation: elementwise, on float32.
      biased: whether queries, keys and values have a bias.
      head_norms: whether queries and keys are normalised.
    """

    shape: BlockShape
    config: BlockConfig
    products: tuple[str, ...]
    eps: float
    unit_offset: bool
    activation: Callable[[Array], Array]
    biased: bool = False
    head_norms: bool = False

    def __post_init__(self) -> None:
        first = PRODUCTS.index(self.products[0]) if self.products and self.products[0] in PRODUCTS else 0
        if not self.products or self.products != PRODUCTS[first : first + len(self.products)]:
            raise ValueError(f"`products`: expected neighbours in {PRODUCTS}, got {self.products!r}")

    @property
    def splits(self) -> tuple[Split, ...]:
        """How each product is shared out."""
        return tuple(self.split(name) for name in self.products)

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

    def rotation(self, number: int) -> int:
        """The program that is the first of a product: one after the last of those that did a block more before."""
        return sum(split.share[1] for split in self.splits[:number]) % self.config.programs

    def added(self, number: int) -> int:
        """How many products before one are added to the residual stream."""
        return sum(name in ADDING for name in self.products[:number])


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
      x: [rows, inputs] what the first product multiplies, bfloat16 like all weights.
      weights: a matrix for each product, [inputs, outputs].
      residual: [row_groups * 4, hidden]; what rows past the last hold is of no matter.
      scales: [hidden] of the norm after `out`, and of that after `down` if `qkv` follows.
      places: of the rows.
      bias: [K (G + 2) H].
      head_scales: of queries and of keys, [H].
      key, value: references to a layer of a cache, [leads, slots, K, H].
      counts: a reference to int32 `COUNTS`, zeros before the first call of a step, and the same for all its calls.
    """

    x: Any
    weights: tuple[Any, ...]
    residual: Any = None
    scales: tuple[Any, ...] = ()
    places: Any = None
    bias: Any = None
    head_scales: tuple[Any, ...] = ()
    key: Any = None
    value: Any = None
    counts: Any = None


def shared_bytes(shape: BlockShape, config: BlockConfig) -> int:
    """Bytes of shared memory of one thread block."""
    stage = 2 * config.block_inputs * (BLOCK_OUTPUTS + round_up(shape.rows, ROWS_MULTIPLE))
    return config.stages * stage + 1024


def heuristic(shape: BlockShape, cores: int) -> BlockConfig:
    """Settings on a chip of `cores` multiprocessors: one program on each, as many stages as fit."""
    first = BlockConfig(cores)
    stage = (shared_bytes(shape, first) - 1024) // first.stages
    return dataclasses.replace(first, stages=(SHARED_BYTES - 1024) // stage)


def refusals(
    shape: BlockShape, config: BlockConfig, dtype: str, products: tuple[str, ...] = PRODUCTS
) -> tuple[str, ...]:
    """Why the kernel cannot take a call with some products; empty when it can."""
    used = shared_bytes(shape, config)
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
        shared = f"shares {split.units} blocks of the product {product} among no more programs than that"
        rules.append((whole and split.units < config.programs, f"{shared}, not {config.programs}"))
        counted = f"counts {COUNTS[1]} sets of tiles of a product, not {split.sets} of {product}"
        rules.append((whole and split.sets > COUNTS[1], counted))
    return tuple(reason for refused, reason in rules if refused)
