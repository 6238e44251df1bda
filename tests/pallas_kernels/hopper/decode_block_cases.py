"""Calls of the fused decoder step on Hopper that its tests go through."""

from typing import Any, NamedTuple

import jax

from pallas_kernels.gpu.hopper.decode_block_config import (
    PHASES,
    PRODUCTS,
    AttentionForm,
    BlockConfig,
    BlockPlan,
    BlockShape,
    Heads,
)

SCALE = 0.3


class Case(NamedTuple):
    """Sizes of a call, and what queries and keys go through."""

    shape: BlockShape
    config: BlockConfig = BlockConfig(3, block_inputs=64, stages=2)
    phases: tuple[str, ...] = PRODUCTS
    options: bool = False  # bias, norms of heads, and norms that multiply by 1 + scale
    held: tuple[int, ...] = ()  # positions of every batch row before the step, where the call attends
    real: tuple[int, ...] = ()  # tokens of every batch row
    layers: int = 1

    @property
    def plan(self) -> BlockPlan:
        more: dict[str, Any] = {"biased": self.options, "head_norms": self.options, "unit_offset": self.options}
        if self.held:
            more |= {"attention": AttentionForm(self.tokens, self.slots, SCALE), "layers": self.layers}
        return BlockPlan(self.shape, self.config, self.phases, 1e-5, activation=jax.nn.silu, **more)

    @property
    def tokens(self) -> int:
        return self.shape.rows // len(self.held) if self.held else 1

    @property
    def slots(self) -> int:
        return 160 if self.held else 8


ONE = Case(BlockShape(1, 128, 128, Heads(2, 1, 64)), BlockConfig(2, block_inputs=64, stages=2))
CASES = {
    "the first call": Case(BlockShape(1, 256, 128, Heads(2, 1, 64)), phases=("qkv",)),
    "three rows": Case(BlockShape(3, 256, 384, Heads(1, 2, 128))),
    "nine rows, all options": Case(BlockShape(9, 256, 256, Heads(2, 1, 64)), options=True),
    "heads of two tiles": Case(BlockShape(5, 256, 128, Heads(1, 1, 256)), options=True),
    "the last call": Case(BlockShape(2, 256, 256, Heads(1, 1, 128)), phases=PRODUCTS[:3]),
}
SMALL = Case(  # two units of 64 keys, one that is hidden altogether, and one of two keys
    BlockShape(3, 128, 128, Heads(1, 2, 64)),
    BlockConfig(2, block_inputs=64, stages=2),
    PHASES,
    held=(80, 0, 1),
    real=(1, 0, 1),
)
FEW = Case(  # of the two blocks a program has at most one, and which program has none changes from layer to layer
    BlockShape(1, 128, 128, Heads(1, 4, 64)), BlockConfig(3, stages=2), PHASES, held=(150,), real=(1,), layers=3
)
ATTENDING = {
    "fewer blocks than programs": FEW,
    "one token": Case(
        BlockShape(1, 128, 128, Heads(2, 1, 128)), BlockConfig(3, stages=2), PHASES, held=(150,), real=(1,), layers=2
    ),
    "rows of two tokens": Case(
        BlockShape(4, 128, 128, Heads(1, 3, 128)), BlockConfig(4, stages=3), PHASES, held=(63, 0), real=(2, 1)
    ),
    "nine tokens, heads of half a tile, all options": Case(
        BlockShape(9, 128, 128, Heads(2, 2, 64)), BlockConfig(2, stages=2), PHASES, True, (137,), (9,), layers=2
    ),
    "no real tokens": Case(
        BlockShape(2, 128, 128, Heads(1, 1, 128)), BlockConfig(5, stages=2), PHASES, held=(0, 70), real=(0, 0)
    ),
}
EVERY = CASES | {f"{name}, with attention": case for name, case in ATTENDING.items()}
