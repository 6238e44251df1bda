"""How programs share out the fused decoder step on Hopper: units of products, blocks of a cache, tasks of the merge."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as hypothetically
from hypothesis import strategies as st

from pallas_kernels.gpu.hopper import decode_block_attention as attention
from pallas_kernels.gpu.hopper import decode_block_line as line
from pallas_kernels.gpu.hopper import decode_block_split as splitting
from pallas_kernels.gpu.hopper.decode_block_config import (
    PHASES,
    PRODUCTS,
    TOGETHER,
    AttentionForm,
    BlockConfig,
    BlockPlan,
    BlockShape,
    Heads,
    heuristic,
)
from pallas_kernels.gpu.hopper.decode_block_split import GROUPS, Split, share_of
from tests.mutants import mutant
from tests.pallas_kernels.hopper.decode_block_cases import ATTENDING, SCALE, SMALL, Case


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
def test_every_tile_is_in_one_set(apart: bool) -> None:
    split = Split(512, 1024, 128, 5, together=2, apart=apart)
    tiles = [split.tiles_of(number) for number in range(split.sets)]
    assert sorted(tile for those in tiles for tile in those) == list(range(split.tiles))
    assert tiles[1] == ([1, 5] if apart else [2, 3])


def assert_one_owner(module: ModuleType) -> None:
    """Distinct programs, where there are enough of them."""
    for sets, programs in ((8, 132), (112, 132), (224, 132), (3, 1)):
        begin, count = (np.asarray(x) for x in module.share_of(*divmod(sets, programs), jnp.arange(programs)))
        owned = [list(range(first, first + many)) for first, many in zip(begin, count, strict=True)]
        assert [one for some in owned for one in some] == list(range(sets))
        assert max(map(len, owned)) == -(-sets // programs)


def test_every_set_has_one_owner() -> None:
    assert_one_owner(splitting)


@pytest.mark.parametrize(
    ("old", "new"), [("jnp.minimum(rank, more)", "more"), ("(rank < more).astype", "(rank <= more).astype")]
)
def test_a_set_of_two_owners_or_none_is_noticed(old: str, new: str) -> None:
    edited = mutant(splitting, (old, new))
    with pytest.raises(AssertionError):
        assert_one_owner(edited)


@pytest.mark.parametrize("attends", [False, True])
def test_programs_that_do_one_more_take_turns(attends: bool) -> None:
    shape = BlockShape(1, 4096, 14336, Heads(8, 4, 128))
    config, phases = heuristic(shape, 132, attends), PHASES if attends else PRODUCTS
    form = AttentionForm(1, 2048, SCALE) if attends else None
    plan = BlockPlan(shape, config, phases, 1e-5, False, jax.nn.silu, attention=form)
    units = np.zeros(132, int)
    for number, split in enumerate(plan.splits):
        if split is not None:
            rank = (np.arange(132) + 132 - plan.rotation(number)) % 132
            units += split.share[0] + (rank < split.share[1])
    assert units.max() - units.min() <= 1


MOST_UNITS = 48
PROGRAMS = 8  # whose parts are asked for together


@functools.cache
def laid_out(module: ModuleType, case: Case) -> Any:
    """What a line says of itself, for lengths [2, B]; of more units than it may have."""

    def numbers(lengths: jax.Array) -> Any:
        plan, own = case.plan, module.Line(case.plan, lengths)
        B, K, *_ = plan.query
        k, b = (jnp.asarray(x.ravel(), jnp.int32) for x in np.indices((K, B)))
        pairs = jax.vmap(own.pair_of)(k, b)
        program = jnp.arange(plan.config.programs, dtype=jnp.int32)
        parts_there = functools.partial(own.parts_there, most=GROUPS * PROGRAMS)
        places = jax.vmap(lambda p: jax.vmap(functools.partial(own.place, p))(pairs))(program)
        return {
            "runs": share_of(own.share[0], own.share[1], program),
            "of units": jax.vmap(own.pair)(jnp.arange(MOST_UNITS, dtype=jnp.int32)),
            "pairs": pairs,
            "programs": jax.vmap(own.programs_of)(pairs),
            "parts": jax.vmap(lambda p: jax.vmap(functools.partial(parts_there, p))(pairs))(program),  # [program, pair]
            "places": places,
        }

    return jax.jit(numbers)


def check_line(module: ModuleType, case: Case, lengths: list[list[int]]) -> None:
    """Against a walk through all units, one by one."""
    found = jax.tree.map(np.asarray, laid_out(module, case)(jnp.asarray(lengths, jnp.int32)))
    B, K, *_ = case.plan.query
    keys = case.config.block_inputs * 64 // case.shape.heads.H
    blocks = [-(-min(max(length, 1), case.slots) // keys) for length in lengths[1]]
    owners = [pair for pair in range(K * B) for _ in range(blocks[pair % B])]
    assert len(owners) <= MOST_UNITS
    # Every unit has one pair, which knows all its units.
    begin, end = found["pairs"].begin, found["pairs"].end
    for unit, pair in enumerate(owners):
        assert [int(x[unit]) for x in found["of units"]] == [pair // B, pair % B, begin[pair], end[pair]]
        assert begin[pair] <= unit < end[pair]
    assert (end - begin).tolist() == blocks * K
    # Every unit has one program; runs differ by one unit at most.
    runs = [range(first, first + count) for first, count in zip(*found["runs"], strict=True)]
    assert [unit for run in runs for unit in run] == list(range(len(owners)))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    # Parts: who has some, how many a head has, and that no two lie in one place.
    parts = sorted({(owners[unit], p) for p, run in enumerate(runs) for unit in run})
    for pair in range(K * B):
        those = [p for other, p in parts if other == pair]
        assert those == list(range(found["programs"][0][pair], found["programs"][1][pair] + 1))
    for first, pair in np.ndindex(len(runs), K * B):
        units = [sum(owners[unit] == pair for unit in run) for run in runs[first : first + PROGRAMS]]
        there = [count > group for count in units for group in range(GROUPS)]
        assert found["parts"][first, pair] == sum(1 << i for i, one in enumerate(there) if one)
    places = {int(found["places"][p, pair]) + group for pair, p in parts for group in range(GROUPS)}
    assert len(places) == GROUPS * len(parts)
    assert max(places) < module.places(case.plan)


LINES = [
    Case(BlockShape(rows, 128, 128, Heads(K, 2, 64)), BlockConfig(programs, block_inputs=64), PHASES, held=(0,) * batch)
    for rows, K, programs, batch in ((1, 1, 3, 1), (6, 2, 5, 3), (4, 3, 1, 2), (2, 4, 40, 2))
]


@pytest.mark.parametrize("case", LINES)
@hypothetically(st.data())
def test_a_line_of_blocks(case: Case, data: st.DataObject) -> None:
    """Lengths past the slots are those of rows that have overflowed."""
    held = data.draw(st.lists(st.integers(0, 250), min_size=len(case.held), max_size=len(case.held)))
    check_line(line, case, [held, [length + case.tokens for length in held]])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("jnp.clip(lengths[1, b], 1, slots)", "jnp.clip(lengths[1, b], 0, slots)"),  # a pair without units
        ("jnp.clip(lengths[1, b], 1, slots)", "jnp.maximum(lengths[1, b], 1)"),  # units past the cache
        ("pair.k * self.plan.query[0]", "pair.k"),  # two pairs in one place
        (
            "(unit, *self.share, div) for unit in (pair.begin, pair.end - 1)",
            "(unit, *self.share, div) for unit in (pair.begin, pair.end)",
        ),
        ("own > group", "own >= group"),
        ("program + i)", "program)"),
        ("jnp.minimum(begin + units, pair.end)", "begin + units"),
        ("later = unit - k * self.ends[-1] >= first", "later = unit - k * self.ends[-1] > first"),
        ("(plan.config.programs + B * K - 1)", "(plan.config.programs + B * K - 2)"),
    ],
)
def test_a_wrong_line_is_noticed(old: str, new: str) -> None:
    edited = mutant(line, (old, new))
    with pytest.raises(AssertionError):
        check_line(edited, LINES[1], [[100, 0, 250]] * 2)


def merged(module: ModuleType, case: Case) -> list[tuple[int, ...]]:
    """Of each task of the merge: head, batch row, group of queries, group of columns."""
    sizes = module.tasks_of_a_head(case.plan)
    return [
        tuple(map(int, attention._coordinates(jnp.int32(task), sizes))) for task in range(module.merge_tasks(case.plan))
    ]


def assert_merged_once(tasks: list[tuple[int, ...]], case: Case) -> None:
    """Every output of a packed query, by one task."""
    B, K, _, H = case.plan.query
    count = np.zeros((K, B, case.tokens * case.shape.heads.G, H), int)
    for k, b, group, columns in tasks:
        assert k < K
        assert b < B
        some = columns * line.TASK_COLUMNS
        assert some < H
        count[k, b, group * TOGETHER : (group + 1) * TOGETHER, some : some + line.TASK_COLUMNS] += 1
    assert (count == 1).all()


@pytest.mark.parametrize("case", [SMALL, ATTENDING["rows of two tokens"], LINES[1]])
def test_the_merge_covers_all_outputs(case: Case) -> None:
    assert_merged_once(merged(line, case), case)


def test_a_wrong_merge_is_noticed() -> None:
    case = ATTENDING["rows of two tokens"]
    edited = mutant(
        line, ("cdiv(plan.tokens * plan.shape.heads.G, TOGETHER)", "plan.tokens * plan.shape.heads.G // TOGETHER")
    )
    with pytest.raises(AssertionError):
        assert_merged_once(merged(edited, case), case)
