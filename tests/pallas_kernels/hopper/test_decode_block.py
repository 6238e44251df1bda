"""The Hopper kernel of a decoder step without a GPU: its phases interpreted one by one, and lowered as one.

Programs run one after the other in the interpreter, so every phase is a launch of its own there.
"""

import functools
import itertools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as hypothetically
from hypothesis import strategies as st

from pallas_kernels.gpu.hopper import decode_block as module
from pallas_kernels.gpu.hopper import decode_block_attention as attention
from pallas_kernels.gpu.hopper import decode_block_line as line
from pallas_kernels.gpu.hopper import decode_block_phases as small_work
from pallas_kernels.gpu.hopper import decode_block_program as program
from pallas_kernels.gpu.hopper import decode_block_stream as stream
from pallas_kernels.gpu.hopper.decode_block_config import (
    ADDING,
    COUNTS,
    PHASES,
    PRODUCTS,
    TOGETHER,
    AttentionForm,
    Begin,
    BlockConfig,
    BlockOperands,
    BlockPlan,
    BlockShape,
    Heads,
    Places,
    beginning,
    heuristic,
    refusals,
)
from pallas_kernels.gpu.hopper.decode_block_grid import GROUPS
from pallas_kernels.gpu.hopper.decode_block_split import Split, share_of
from tests.mutants import mutant
from tests.pallas_kernels.hopper.decode_block_words import words_interpreted

SCALE = 0.3
PLACES = np.array([3, 4, 8, 0, 1, 2, 5, -1, 7])  # of rows whose attention is elsewhere; two are dropped


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
ATTENDING = {
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


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def rounded(x: Any) -> np.ndarray:
    return wide(jnp.asarray(x, jnp.bfloat16))


def operands(case: Case, calls: int = 1) -> BlockOperands:
    """Of a call, or of all calls of a step that attends, whose layers are those of one call after the other.

    References are arrays here. What lies past the positions of a batch row is NaN.
    """
    rng = np.random.default_rng(0)
    shape, plan, (K, G, H) = case.shape, case.plan, case.shape.heads
    layers, makes = case.layers * (calls if case.held else 1), "qkv" in case.phases

    def normal(*size: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(size=size) * scale, jnp.bfloat16)

    def cache() -> jax.Array:
        x = normal(max(2, len(case.held)), case.slots, K, H)
        for b, length in enumerate(case.held):
            x = x.at[b, length:].set(jnp.nan)
        return x

    sizes = [shape.matrix(name) if name in PRODUCTS else None for name in case.phases]
    lead, slot = np.arange(shape.rows) % 2, PLACES[: shape.rows]
    if case.held:
        lead, token = np.divmod(np.arange(shape.rows), case.tokens)
        slot = np.where(token < np.array(case.real)[lead], np.array(case.held)[lead] + token, case.slots)
    angle = rng.normal(size=(shape.rows, H // 2))
    followed = [name for name in ADDING if case.held or name in case.phases[:-1]]
    begin, x = normal(plan.row_groups * TOGETHER, shape.hidden), None
    if case.held:
        wide_rows = wide(begin)[: shape.rows]
        scaled = jnp.asarray(wide_rows * 1.5, jnp.bfloat16)  # by the scale of the norm in front of the first layer
        squares = (wide_rows**2).reshape(shape.rows, -1, 128).sum(-1)
        values = begin, scaled, jnp.asarray(squares, jnp.float32)
        begin = Begin(*map(at_least_as_large, values, beginning(plan, jnp.bfloat16)))
    else:
        x = normal(shape.rows, sizes[0][0])
    return BlockOperands(
        x=x,
        weights=tuple(
            () if size is None else tuple(normal(*size, scale=size[0] ** -0.5) for _ in range(layers)) for size in sizes
        ),
        residual=None if case.held else begin,
        scales={name: normal(layers, shape.hidden) for name in followed},
        places=Places(
            *(jnp.asarray(x, jnp.int32) for x in (lead, slot)),
            *(jnp.asarray(x, jnp.float32) for x in (np.cos(angle), np.sin(angle))),
        ),
        bias=normal(layers, K * (G + 2) * H) if makes and case.options else None,
        head_scales=(normal(layers, H), normal(layers, H)) if makes and case.options else (),
        lengths=jnp.asarray([case.held, np.add(case.held, case.real)], jnp.int32) if case.held else None,
        first=jnp.zeros(1, jnp.int32) if case.held else None,
        begin=begin if case.held else None,
        caches=tuple((cache(), cache()) for _ in range(layers)) if makes else (),
    )


def at_least_as_large(x: jax.Array, shape: Any) -> jax.Array:
    """NaN where the kernel has to look at nothing."""
    pad = [(0, size - had) for had, size in zip(x.shape, shape.shape, strict=True)]
    return jnp.pad(x, pad, constant_values=jnp.nan)


def of_call(case: Case, whole: BlockOperands, number: int) -> BlockOperands:
    """One call's own of the operands of a step."""
    if not case.held:
        return whole
    some = slice(number * case.layers, (number + 1) * case.layers)
    weights = tuple(each[some] for each in whole.weights)
    return whole._replace(weights=weights, caches=whole.caches[some], first=whole.first + number * case.layers)


def interpret(case: Case, kernel: ModuleType, calls: int) -> dict[str, Any]:
    """What some calls with the same counts leave behind, each in memory that is full of NaN at first."""
    whole, shapes = operands(case, calls), kernel.buffers(case.plan, jnp.bfloat16)
    begin, caches, counts = whole.begin, whole.caches, jnp.zeros(COUNTS, jnp.int32)
    for number in range(calls):
        out = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes)
        for at in itertools.product(range(case.layers), range(len(case.phases))):

            def run(state: Any, number: int = number, at: tuple[int, int] = at) -> Any:
                into, begin, caches, counts = refs = jax.tree.map(jax.new_ref, state)
                own = of_call(case, whole._replace(caches=caches), number)._replace(begin=begin, counts=counts)
                kernel.decode_block(case.plan, own, at, into)
                return jax.tree.map(jax.freeze, refs)

            with words_interpreted():
                out, begin, caches, counts = jax.jit(run)((out, begin, caches, counts))
    return named(case, begin.residual if case.held else out.residual, out.query, caches)


def named(case: Case, residual: Any, query: Any, caches: Any) -> dict[str, Any]:
    """What a step leaves behind."""
    found = {"residual": residual} if set(ADDING) & set(case.phases) else {}
    for layer, cache in enumerate(caches):
        found |= {f"{name} {layer}": x for name, x in zip(("key", "value"), cache, strict=True)}
    return found | ({"query": query} if caches else {})


def expected(case: Case, calls: int) -> dict[str, Any]:
    """The same by numpy in float64, phase by phase; what is stored is rounded."""
    given, shape, (K, G, H), T = operands(case, calls), case.shape, case.shape.heads, case.tokens
    caches = [[wide(x).copy() for x in cache] for cache in given.caches]
    residual = wide(given.residual if given.begin is None else given.begin.residual)[: shape.rows]
    query: Any = None

    def norm(x: Any, scale: Any) -> np.ndarray:
        return rounded(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (wide(scale) + float(case.options)))

    x = wide(given.x) if given.begin is None else norm(residual, 1.5 - float(case.options))
    for layer, (number, name) in itertools.product(range(max(1, len(caches))), enumerate(case.phases)):
        y: Any = x @ wide(given.weights[number][layer]) if name in PRODUCTS else None
        if name == "attend":
            x = rounded(attended(case, query, *caches[layer]))
        elif name in ADDING:
            residual = rounded(residual + y)
            x = norm(residual, given.scales[name][layer]) if name in given.scales else None
        elif name == "gate_up":
            gate, up = np.split(y, 2, axis=-1)
            x = rounded(gate / (1 + np.exp(-gate)) * up)
        elif name == "qkv":
            y = rounded(y + wide(given.bias[layer]) if case.options else y).reshape(shape.rows, K, G + 2, H)
            for some, scale in zip((slice(0, G), slice(G, G + 1)), given.head_scales, strict=False):
                y[:, :, some] = norm(y[:, :, some], scale[layer])
            first, second = np.split(y, 2, axis=-1)
            cos, sin = (wide(x)[:, None, None] for x in (given.places.cos, given.places.sin))
            turned = rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))
            for row, (lead, slot) in enumerate(zip(given.places.lead, given.places.slot, strict=True)):
                if 0 <= slot < case.slots:
                    for cache, new in zip(caches[layer], (turned[row, :, G], y[row, :, G + 1]), strict=True):
                        cache[lead, slot] = new
            query = turned[:, :, :G].reshape(-1, T, K, G, H).swapaxes(1, 2).reshape(-1, K, T * G, H)
    return named(case, residual, query, caches)


def attended(case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Rows [rows, K G H] of causal attention over what a row holds with its real tokens."""
    K, G, H = case.shape.heads
    out = np.zeros((len(case.held), case.tokens, K, G, H))
    for b, (held, real) in enumerate(zip(case.held, case.real, strict=True)):
        for t in range(case.tokens):
            end = min(held + t + 1, held + real)
            for k in range(K) if end else ():
                scores = query[b, k, t * G : (t + 1) * G] @ key[b, :end, k].T * SCALE
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                out[b, t, k] = weights / weights.sum(-1, keepdims=True) @ value[b, :end, k]
    return out.reshape(case.shape.rows, -1)


def check(case: Case, kernel: ModuleType = module, calls: int = 1) -> None:
    assert not refusals(case.shape, case.config, "bfloat16", attention=case.plan.attention)
    want, got = expected(case, calls), interpret(case, kernel, calls)
    assert got.keys() == want.keys()
    for name, x in want.items():
        own = wide(got[name])
        if name == "residual":
            own = own[: case.shape.rows]
        elif name == "query":
            own = own[:, :, : x.shape[2]]
        np.testing.assert_array_equal(np.isnan(own), np.isnan(x), err_msg=name)
        assert np.nanmax(np.abs(own - x)) <= 2**-6 * np.nanmax(np.abs(x)), name


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_interpreted(case: Case) -> None:
    check(case)


def test_a_layer_with_attention() -> None:
    check(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "calls"), [(CASES["three rows"], 3), (ATTENDING["one token"], 2)], ids=["between", "with attention"]
)
def test_calls_of_a_step_share_their_counts(case: Case, calls: int) -> None:
    check(case, calls=calls)


EDITED = {
    small_work: ("finish",),
    stream: ("copy_rows", "multiply"),
    attention: ("attend", "merge"),
}


def wrong(place: ModuleType, old: str, new: str) -> ModuleType:
    """The kernel with an edit in one of the modules that do its work."""
    edited = mutant(place, (old, new))
    return mutant(module, **{name: getattr(edited, name) for name in EDITED[place]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        (small_work, "before.astype(jnp.float32) + product", "product"),  # the residual is left out
        (small_work, "jnp.minimum(first + i, last) + tile", "first + tile"),  # one part of a tile is read for all
        (small_work, "parts[0] * cos - parts[1] * sin", "parts[0] * cos + parts[1] * sin"),
        (small_work, "before = BEFORE[p.plan.phases[run.number]]", 'before = "out"'),  # the factor of the norm before
        (stream, "split.parts_of(tiles, div),", "split.parts_of(tiles, div) - 1,"),  # summed before its last part
        (small_work, '"out": ("down", "qkv")', '"out": ()'),  # words of the call before say that all is done
    ],
)
def test_a_wrong_kernel_is_noticed(place: ModuleType, old: str, new: str) -> None:
    kernel = wrong(place, old, new)
    with pytest.raises(AssertionError):
        check(CASES["three rows"], kernel, calls=2 if old.startswith('"out"') else 1)


@pytest.mark.slow
def test_a_kernel_of_wrong_layers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = wrong(small_work, "scales[name].at[run.turn", "scales[name].at[run.layer")  # those of the step's first
    with pytest.raises(AssertionError):
        check(ATTENDING["one token"], kernel, calls=2)
    monkeypatch.setattr(program.Program, "of_layer", lambda p, layer, choices, do: do(choices[0]))
    with pytest.raises(AssertionError):
        check(ATTENDING["one token"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        (attention, "held + token, length - 1", "held + token - 1, length - 1"),  # its own key is hidden
        (attention, "jnp.minimum(held + token, length - 1)", "held + token"),  # a token that is not real sees its key
        (attention, "_across(weight,", "_across(jnp.ones_like(weight),"),  # parts weigh alike
        (attention, "start + line.keys > length", "start < 0"),  # 0 times NaN
    ],
)
def test_wrong_attention_is_noticed(place: ModuleType, old: str, new: str) -> None:
    kernel = wrong(place, old, new)
    with pytest.raises(AssertionError):
        check(SMALL, kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "old", "new", "case", "message"),
    [
        # Nobody comes last.
        (
            stream,
            "split.parts_of(tiles, div),",
            "split.parts_of(tiles, div) + 1,",
            CASES["three rows"],
            "rows are looked",
        ),
        (small_work, "p.words(name).at[tiles]", "p.words(name).at[0]", CASES["three rows"], "rows are looked"),
        (stream, "div), run.turn)", "div), jnp.int32(0))", ATTENDING["one token"], "rows are looked"),
        (
            attention,
            'tell(p.words("merge").at[k])',
            'tell(p.words("merge").at[0])',
            ATTENDING["one token"],
            "rows are looked",
        ),
        (attention, "line.parts_of(k)", "line.parts_of(k) + 1", SMALL, "parts are waited"),
        (
            attention,
            "(run.turn + 1) * line.parts_of(k)",
            "line.parts_of(k)",
            ATTENDING["one token"],
            "parts are waited",
        ),
    ],
)
def test_a_kernel_that_would_wait_for_ever_is_noticed(
    place: ModuleType, old: str, new: str, case: Case, message: str
) -> None:
    kernel = wrong(place, old, new)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{message} for that never come"):
        check(case, kernel, calls=2)


def lowered(case: Case) -> str:
    def call(given: BlockOperands) -> Any:
        begin, caches, counts = refs = jax.tree.map(
            jax.new_ref, (given.begin, given.caches, jnp.zeros(COUNTS, jnp.int32))
        )
        out = module.decode_block(case.plan, given._replace(begin=begin, caches=caches, counts=counts))
        return out.residual, out.query, *map(jax.freeze, jax.tree.leaves(refs))

    return jax.jit(call).trace(operands(case)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_lowers_for_a_gpu(case: Case) -> None:
    assert lowered(case).count("stablehlo.custom_call @mosaic_gpu") == 1


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


@functools.cache
def laid_out(module: ModuleType, case: Case) -> Any:
    """What a line says of itself, for lengths [2, B]; of more units than it may have."""

    def numbers(lengths: jax.Array) -> Any:
        plan, own = case.plan, module.Line(case.plan, lengths)
        B, K, *_ = plan.query
        k, b = (jnp.asarray(x.ravel(), jnp.int32) for x in np.indices((K, B)))
        pairs = jax.vmap(own.pair_of)(k, b)
        program = jnp.arange(plan.config.programs, dtype=jnp.int32)
        places = jax.vmap(lambda p: jax.vmap(functools.partial(own.place, p))(pairs))(program)
        return {
            "runs": share_of(own.share[0], own.share[1], program),
            "of units": jax.vmap(own.pair)(jnp.arange(MOST_UNITS, dtype=jnp.int32)),
            "pairs": pairs,
            "programs": jax.vmap(own.programs_of)(pairs),
            "parts": jax.vmap(own.parts_of)(jnp.arange(K, dtype=jnp.int32)),
            "places": places,  # [program, pair]
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
    assert found["parts"].tolist() == [GROUPS * sum(pair // B == k for pair, _ in parts) for k in range(K)]
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
        ("jnp.int32(0)) * GROUPS", "jnp.int32(0))"),
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


@pytest.mark.parametrize(
    ("phases", "attends"),
    [
        (("out", "down"), False),
        (PHASES, False),  # where attention is elsewhere
        (("qkv", "out"), False),  # of two layers
        (PHASES[1:], True),  # a part of a layer
        (PRODUCTS, True),
        ((), True),
        ((), False),
    ],
)
def test_phases_that_are_no_call(phases: tuple[str, ...], attends: bool) -> None:
    form = AttentionForm(1, 160, SCALE) if attends else None
    with pytest.raises(ValueError, match="`phases`: expected "):
        BlockPlan(ONE.shape, ONE.config, phases, 1e-5, False, jax.nn.silu, attention=form)


@pytest.mark.parametrize(("layers", "form"), [(2, None), (0, AttentionForm(1, 160, SCALE))])
def test_layers_that_are_no_call(layers: int, form: AttentionForm | None) -> None:
    phases = PRODUCTS if form is None else PHASES
    with pytest.raises(ValueError, match="`layers`: expected 1, or more with attention, got"):
        BlockPlan(ONE.shape, ONE.config, phases, 1e-5, False, jax.nn.silu, attention=form, layers=layers)


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
    assert not refusals(small, BlockConfig(132), "bfloat16")  # of fewer blocks than programs


@pytest.mark.parametrize(
    ("heads", "form", "reason"),
    [
        (Heads(2, 1, 256), {}, "attends by heads of (64, 128), not of 256"),
        (Heads(8, 4, 128), {"tokens": 17}, "packs 64 queries of a key/value head at most, not 68"),
        (Heads(2, 1, 64), {}, "attends where 128 columns are of one key/value head, not with 1 heads of 64"),
        (Heads(8, 4, 128), {"slots": 56}, "attends over caches of 64 slots at least, not 56"),
        (Heads(8, 4, 64), {"slots": 120}, "attends over caches of 128 slots at least, not 120"),
        (Heads(513, 2, 64), {}, "counts 512 key/value heads, not 513"),
    ],
)
def test_attention_that_the_kernel_does_not_take(heads: Heads, form: dict[str, int], reason: str) -> None:
    shape = BlockShape(1, 4096, 14336, heads)
    config = heuristic(shape, 132, attends=True)
    taken = AttentionForm(**{"tokens": 1, "slots": 2048} | form, scale=SCALE)
    assert reason in refusals(shape, config, "bfloat16", PRODUCTS[:1], taken)
    llama = BlockShape(16, 4096, 14336, Heads(8, 4, 128))
    assert not refusals(llama, heuristic(llama, 132, True), "bfloat16", attention=AttentionForm(16, 64, SCALE))
