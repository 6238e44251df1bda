"""The Hopper kernel between two attentions without a GPU: its products interpreted one by one, and lowered as one.

Programs run one after the other in the interpreter, so every product is a launch of its own there.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.hopper import decode_block as module
from pallas_kernels.gpu.hopper import decode_block_phases as phases
from pallas_kernels.gpu.hopper import decode_block_stream as stream
from pallas_kernels.gpu.hopper.decode_block_config import (
    COUNTS,
    PRODUCTS,
    BlockConfig,
    BlockOperands,
    BlockPlan,
    BlockShape,
    Heads,
    Places,
    heuristic,
    refusals,
)
from pallas_kernels.gpu.hopper.decode_block_split import Split
from tests.mutants import mutant
from tests.pallas_kernels.hopper.decode_block_words import words_interpreted

SLOTS = 8


class Case(NamedTuple):
    """Sizes of a call, and what queries and keys go through."""

    shape: BlockShape
    config: BlockConfig = BlockConfig(3, block_inputs=64, stages=2)
    products: tuple[str, ...] = PRODUCTS
    options: bool = False  # bias, norms of heads, and norms that multiply by 1 + scale

    @property
    def plan(self) -> BlockPlan:
        more = {"biased": self.options, "head_norms": self.options, "unit_offset": self.options}
        return BlockPlan(self.shape, self.config, self.products, 1e-5, activation=jax.nn.silu, **more)


ONE = Case(BlockShape(1, 128, 128, Heads(2, 1, 64)), BlockConfig(2, block_inputs=64, stages=2))
CASES = {
    "the first call": Case(BlockShape(1, 256, 128, Heads(2, 1, 64)), products=("qkv",)),
    "three rows": Case(BlockShape(3, 256, 384, Heads(1, 2, 128))),
    "nine rows, all options": Case(BlockShape(9, 256, 256, Heads(2, 1, 64)), options=True),
    "heads of two tiles": Case(BlockShape(5, 256, 128, Heads(1, 1, 256)), options=True),
    "the last call": Case(BlockShape(2, 256, 256, Heads(1, 1, 128)), products=PRODUCTS[:3]),
}


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def rounded(x: Any) -> np.ndarray:
    return wide(jnp.asarray(x, jnp.bfloat16))


def operands(case: Case) -> tuple[BlockOperands, jax.Array, jax.Array]:
    """A call's arrays, and the cache before it."""
    rng = np.random.default_rng(0)

    def normal(*size: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(size=size) * scale, jnp.bfloat16)

    shape, plan, (K, G, H) = case.shape, case.plan, case.shape.heads
    angle = rng.normal(size=(shape.rows, H // 2))
    lead = np.arange(shape.rows) % 2
    slot = np.array([3, 4, SLOTS, 0, 1, 2, 5, -1, 7])[: shape.rows]  # two are dropped
    turns = (jnp.asarray(x, jnp.float32) for x in (np.cos(angle), np.sin(angle)))
    places = Places(*(jnp.asarray(x, jnp.int32) for x in (lead, slot)), *turns)
    weights = tuple(normal(*shape.matrix(name), scale=shape.matrix(name)[0] ** -0.5) for name in case.products)
    given = BlockOperands(
        normal(shape.rows, shape.matrix(case.products[0])[0]),
        weights,
        normal(plan.row_groups * 4, shape.hidden) if "out" in case.products else None,
        (normal(shape.hidden), normal(shape.hidden)) if "out" in case.products else (),
        places if "qkv" in case.products else None,
        normal(K * (G + 2) * H) if case.options else None,
        (normal(H), normal(H)) if case.options else (),
    )
    return given, normal(2, SLOTS, K, H), normal(2, SLOTS, K, H)


def interpret(case: Case, kernel: ModuleType, calls: int) -> dict[str, Any]:
    """What the last of some calls with the same counts leaves behind, each in memory that is full of NaN at first."""
    given, key, value = operands(case)
    shapes = kernel.buffers(case.plan, jnp.bfloat16)
    counts = jnp.zeros(COUNTS, jnp.int32)
    for number in range(calls * len(case.products)):
        product = number % len(case.products)
        if product == 0:
            out = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes)

        def run(state: Any, product: int = product) -> Any:
            into, key, value, counts = refs = jax.tree.map(jax.new_ref, state)
            kernel.decode_block(case.plan, given._replace(key=key, value=value, counts=counts), product, into)
            return jax.tree.map(jax.freeze, refs)

        with words_interpreted():
            out, key, value, counts = jax.jit(run)((out, key, value, counts))
    found = {"residual": out.residual, "query": out.query}
    found |= {"key": key, "value": value} if "qkv" in case.products else {}
    return {name: x for name, x in found.items() if x is not None}


def expected(case: Case) -> dict[str, Any]:
    """The same by numpy in float64."""
    given, key, value = operands(case)
    (K, G, H), rows, offset = case.shape.heads, case.shape.rows, float(case.options)
    weights = dict(zip(case.products, map(wide, given.weights), strict=True))
    found: dict[str, Any] = {}

    def norm(x: Any, scale: Any) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (wide(scale) + offset)

    x = wide(given.x)
    if "out" in weights:
        after = rounded(wide(given.residual)[:rows] + x @ weights["out"])
        gate, up = np.split(norm(after, given.scales[0]) @ weights["gate_up"], 2, axis=-1)
        found["residual"] = after + gate / (1 + np.exp(-gate)) * up @ weights["down"]
        x = norm(found["residual"], given.scales[1])
    if "qkv" not in weights:
        return found
    y = x @ weights["qkv"]
    if case.options:
        y = y + wide(given.bias)
    y = y.reshape(rows, K, G + 2, H)
    if case.options:
        y[:, :, :G] = norm(y[:, :, :G], given.head_scales[0])
        y[:, :, G] = norm(y[:, :, G], given.head_scales[1])
    first, second = np.split(y, 2, axis=-1)
    cos, sin = (wide(x)[:, None, None] for x in (given.places.cos, given.places.sin))
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    new = {"key": wide(key).copy(), "value": wide(value).copy()}
    for row, (lead, slot) in enumerate(zip(given.places.lead, given.places.slot, strict=True)):
        if 0 <= slot < SLOTS:
            new["key"][lead, slot], new["value"][lead, slot] = turned[row, :, G], y[row, :, G + 1]
    return found | new | {"query": turned[:, :, :G].reshape(rows, K * G, H)}


def check(case: Case, kernel: ModuleType = module, calls: int = 1) -> None:
    assert not refusals(case.shape, case.config, "bfloat16")
    want, got = expected(case), interpret(case, kernel, calls)
    assert got.keys() == want.keys()
    for name, x in want.items():
        own = wide(got[name])[: case.shape.rows] if name == "residual" else wide(got[name])
        assert np.isfinite(own).all(), name
        assert np.abs(own - x).max() <= 2**-6 * np.abs(x).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    check(CASES[name])


def test_a_whole_call() -> None:
    check(ONE)


@pytest.mark.slow
def test_calls_of_a_step_share_their_counts() -> None:
    check(CASES["three rows"], calls=3)


def wrong(place: ModuleType, old: str, new: str) -> ModuleType:
    """The kernel with an edit in one of the modules that do its work."""
    edited = mutant(place, (old, new))
    names = ("finish",) if place is phases else ("copy_rows", "multiply")
    return mutant(module, **{name: getattr(edited, name) for name in names})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        (phases, "before.astype(jnp.float32) + product", "product"),  # the residual is left out
        (phases, "jnp.minimum(first + i, last) + tile", "first + tile"),  # one part of a tile is read for all
        (phases, "parts[0] * cos - parts[1] * sin", "parts[0] * cos + parts[1] * sin"),
        (phases, "earlier - 1]", "0]"),  # the factor of the norm before, for the second
        (stream, "split.parts_of(tiles, div))", "split.parts_of(tiles, div) - 1)"),  # summed before its last part
        (phases, "(place - 2,) if number > 1 else ()", "()"),  # words of the call before say that all is done
    ],
)
def test_a_wrong_kernel_is_noticed(place: ModuleType, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check(CASES["three rows"], wrong(place, old, new), calls=2 if "place" in old else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        (stream, "split.parts_of(tiles, div))", "split.parts_of(tiles, div) + 1)"),  # nobody comes last
        (phases, "grid.tell(p.words(number).at[tiles])", "grid.tell(p.words(number).at[0])"),
    ],
)
def test_a_kernel_that_would_wait_for_ever_is_noticed(place: ModuleType, old: str, new: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows are looked for that never come"):
        check(CASES["three rows"], wrong(place, old, new))


def lowered(case: Case) -> str:
    given, key, value = operands(case)

    def call(given: BlockOperands, *held: jax.Array) -> Any:
        key, value, counts = refs = tuple(map(jax.new_ref, held))
        out = module.decode_block(case.plan, given._replace(key=key, value=value, counts=counts))
        return out.residual, out.query, *map(jax.freeze, refs)

    counts = jnp.zeros(COUNTS, jnp.int32)
    return jax.jit(call).trace(given, key, value, counts).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_lowers_for_a_gpu(name: str) -> None:
    assert lowered(CASES[name]).count("stablehlo.custom_call @mosaic_gpu") == 1


def test_lowers_in_64_bit_mode(x64: None) -> None:
    assert "mosaic_gpu" in lowered(ONE)


@pytest.mark.parametrize(
    ("inputs", "outputs", "programs"), [(128, 128, 1), (512, 384, 5), (4096, 6144, 132), (256, 1024, 16)]
)
def test_every_unit_has_one_program_and_every_part_a_place(inputs: int, outputs: int, programs: int) -> None:
    split = Split(inputs, outputs, 128, programs)
    owner = split.program_of(np.arange(split.units))
    counts = np.bincount(owner, minlength=programs)
    least, more = split.share
    assert counts.tolist() == [least + 1] * more + [least] * (programs - more)
    assert (np.diff(owner) >= 0).all()
    tile = np.arange(split.units) // split.blocks
    parts = set(zip(owner.tolist(), tile.tolist(), strict=True))
    assert len({program + tile for program, tile in parts}) == len(parts) <= split.places
    assert split.most_parts == max(np.unique(owner[tile == t]).size for t in range(split.tiles))


@pytest.mark.parametrize("apart", [False, True])
def test_every_tile_is_in_one_set_with_all_its_parts(apart: bool) -> None:
    split = Split(512, 1024, 128, 5, together=2, apart=apart)
    tiles = [split.tiles_of(number) for number in range(split.sets)]
    assert sorted(tile for those in tiles for tile in those) == list(range(split.tiles))
    assert all(split.set_of(tile) == number for number, those in enumerate(tiles) for tile in those)
    assert tiles[1] == ([1, 5] if apart else [2, 3])
    assert sum(map(split.parts_of, range(split.sets))) == len(
        {(int(split.program_of(unit)), unit // split.blocks) for unit in range(split.units)}
    )


def test_programs_that_do_one_more_take_turns() -> None:
    plan = BlockPlan(
        BlockShape(1, 4096, 14336, Heads(8, 4, 128)),
        heuristic(CASES["three rows"].shape, 132),
        PRODUCTS,
        1e-5,
        False,
        jax.nn.silu,
    )
    units = np.zeros(132, int)
    for number, split in enumerate(plan.splits):
        rank = (np.arange(132) + 132 - plan.rotation(number)) % 132
        units += split.share[0] + (rank < split.share[1])
    assert units.max() - units.min() <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"programs": 0}, r"`programs`: expected an integer in \[1, 65536\], got 0"),
        ({"programs": 1, "stages": 1}, r"`stages`: expected an integer in \[2, 32\], got 1"),
        ({"programs": 1, "block_inputs": 96}, "`block_inputs`: expected 64 or 128, got 96"),
    ],
)
def test_illegal_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockConfig(**settings)


def test_products_that_are_no_neighbours() -> None:
    with pytest.raises(ValueError, match="`products`: expected neighbours"):
        CASES["three rows"]._replace(products=("out", "down")).plan  # noqa: B018


def test_what_the_kernel_does_not_take() -> None:
    llama = BlockShape(1, 4096, 14336, Heads(8, 4, 128))
    assert not refusals(llama, heuristic(llama, 132), "bfloat16")
    reasons = " ".join(refusals(BlockShape(17, 4096, 100, Heads(2, 1, 96)), BlockConfig(132, stages=8), "float16"))
    for reason in (
        "computes in bfloat16, not in float16",
        "takes 1 to 16 rows, not 17",
        "takes heads of (64, 128, 256), not of 96",
        "takes an MLP of a multiple of 128, not of 100",
        "bytes of shared memory are more than",
        "not a product out of 192 x 4096",
    ):
        assert reason in reasons
    wide = BlockShape(1, 4096, 2**16 + 128, Heads(8, 4, 128))
    assert "counts 512 sets of tiles of a product, not 513 of gate_up" in refusals(wide, BlockConfig(132), "bfloat16")
    small = BlockShape(1, 512, 1024, Heads(1, 4, 128))
    (few,) = [line for line in refusals(small, BlockConfig(132), "bfloat16") if "product out" in line]
    assert few == "shares 16 blocks of the product out among no more programs than that, not 132"
