"""The Hopper kernel of a decoder step without a GPU: its phases interpreted one by one, and lowered as one.

Programs run one after the other in the interpreter, so every phase is a launch of its own there.
"""

import itertools
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.hopper import decode_block as module
from pallas_kernels.gpu.hopper import decode_block_attention as attention
from pallas_kernels.gpu.hopper import decode_block_phases as small_work
from pallas_kernels.gpu.hopper import decode_block_program as program
from pallas_kernels.gpu.hopper import decode_block_stream as stream
from pallas_kernels.gpu.hopper.decode_block_config import (
    ADDING,
    COUNTS,
    PRODUCTS,
    TOGETHER,
    Begin,
    BlockOperands,
    BlockPlan,
    Places,
    beginning,
    refusals,
)
from pallas_kernels.gpu.hopper.decode_block_letters_config import letters_of
from pallas_kernels.gpu.hopper.decode_block_program import Only
from tests.mutants import mutant
from tests.pallas_kernels.hopper.decode_block_cases import ATTENDING, CASES, EVERY, FEW, ONE, SCALE, SMALL, Case
from tests.pallas_kernels.hopper.decode_block_words import words_interpreted

PLACES = np.array([3, 4, 8, 0, 1, 2, 5, -1, 7])  # of rows whose attention is elsewhere; two are dropped


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
        begin = Begin(*map(at_least_as_large, (begin, scaled), beginning(plan, jnp.bfloat16)))
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


def letters(plan: BlockPlan, begin: Begin | None) -> jax.Array:
    """All letters, of which only what a step begins with has been sent; that of no turn, which none is, is NaN."""
    boxes, rows = letters_of(plan), plan.shape.rows
    whole = np.zeros((boxes.total, 2), np.int32)
    whole[:, 0] = np.float32(np.nan).view(np.int32)
    if begin is not None:
        squares = (wide(begin.residual[:rows]) ** 2).reshape(rows, -1, 128).sum(-1)
        whole[: squares.size] = np.stack([squares.astype(np.float32).view(np.int32).ravel(), np.ones(squares.size)], 1)
    return jnp.asarray(whole)


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


def interpret(
    case: Case, kernel: ModuleType, calls: int, patience: float | None = None, own_counts: bool = True
) -> dict[str, Any]:
    """What some calls of a step leave behind, each in memory that is full of NaN at first.

    Args:
      case: of the calls.
      kernel: the kernel, or a wrong one.
      calls: how many.
      patience: None to launch every phase of every layer alone; how many seconds programs wait for each other's words
        where they run side by side, all phases of all layers in one launch.
      own_counts: whether every call that does not attend begins with its own words, as it has to.
    """
    whole, shapes = operands(case, calls), kernel.buffers(case.plan, jnp.bfloat16)
    begin, caches = whole.begin, whole.caches
    for number in range(calls):
        if number == 0 or not case.held:
            post = letters(case.plan, begin if case.held else None)
        if number == 0 or (own_counts and not case.held):
            counts = jnp.zeros(COUNTS, jnp.int32)
        out = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes)
        alone = itertools.starmap(Only, itertools.product(range(case.layers), range(len(case.phases)), (False, True)))
        for at in alone if patience is None else (None,):

            def run(state: Any, number: int = number, at: Only | None = at) -> Any:
                into, begin, caches, counts, post = refs = jax.tree.map(jax.new_ref, state)
                own = of_call(case, whole._replace(caches=caches), number)
                own = own._replace(begin=begin, counts=counts, letters=post)
                kernel.decode_block(case.plan, own, at, into)
                return jax.tree.map(jax.freeze, refs)

            with words_interpreted(patience):
                out, begin, caches, counts, post = jax.jit(run)((out, begin, caches, counts, post))
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


def check(
    case: Case, kernel: ModuleType = module, calls: int = 1, patience: float | None = None, own_counts: bool = True
) -> None:
    assert not refusals(case.shape, case.config, "bfloat16", attention=case.plan.attention)
    want, got = expected(case, calls), interpret(case, kernel, calls, patience, own_counts)
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


MOST_PROGRAMS = 3  # that run side by side
PATIENCE, SHORT = 60.0, 10.0  # seconds; of who waits in vain


def test_programs_side_by_side() -> None:
    check(FEW, patience=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in EVERY.items() if case.config.programs <= MOST_PROGRAMS])
def test_all_programs_side_by_side(name: str) -> None:
    check(EVERY[name], patience=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "calls"), [(CASES["three rows"], 3), (ATTENDING["one token"], 2)], ids=["between", "with attention"]
)
def test_several_calls_of_a_step(case: Case, calls: int) -> None:
    check(case, calls=calls)


FIVE = """
from pallas_kernels.gpu.hopper.decode_block_config import BlockConfig, BlockShape, Heads
from tests.pallas_kernels.hopper.test_decode_block import PATIENCE, SHORT, Case, check
case = Case(BlockShape(1, 128, 128, Heads(1, 2, 64)), BlockConfig(5, block_inputs=128, stages=2))
check(case, calls=2, patience=PATIENCE)
try:
    check(case, calls=2, patience=SHORT, own_counts=False)
except AssertionError:
    print("noticed")
"""


@pytest.mark.slow
def test_more_programs_than_blocks_of_a_product() -> None:
    """Programs without a block of `down` begin with `qkv` at once: nothing of the call before may tell them to go on.

    Five programs are more than the threads of this process.
    """
    threads = {"XLA_FLAGS": "--xla_force_host_platform_device_count=32", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FIVE]
    done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "noticed\n"), done.stderr


EDITED = {
    small_work: ("finish",),
    stream: ("copy_rows", "multiply"),
    attention: ("attend", "merge"),
}


def wrong(place: ModuleType, *edit: str, own: tuple[tuple[str, str], ...] = ()) -> ModuleType:
    """The kernel with an edit in one of the modules that do its work, and others in its own."""
    edited = mutant(place, edit)
    names = {name: getattr(edited, name) for name in EDITED[place]}
    if place is attention:
        copying = mutant(stream, attention=edited)
        names |= {name: getattr(copying, name) for name in ("copy_rows", "copy_weights")}
    return mutant(module, *own, **names)


WAIT = "            plgpu.barrier_wait(p.scratch.query_free)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "own"),
    [
        # An earlier layer is waited for, of which a program may have had nothing.
        (
            WAIT,
            f"            pl.when((unit != run.begin) | (run.layer > 0))(lambda: {WAIT.strip()})\n",
            (("            plgpu.barrier_arrive(p.scratch.query_free)", "            pass"),),
        ),
        (f"            _wait_for_heads(p, run, pair.k)\n{WAIT}", WAIT, ()),  # queries that are not there yet
        ("slots.start + slots.size > held", "slots.start > held", ()),  # keys that are not there yet
    ],
)
def test_programs_that_wait_wrongly_are_noticed(old: str, new: str, own: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check(FEW, wrong(attention, old, new, own=own), patience=SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        (small_work, "before.astype(jnp.float32) + product", "product"),  # the residual is left out
        (small_work, "last - first + 1 - begin", "last - first - begin"),  # summed without its last part
        (small_work, "parts[0] * cos - parts[1] * sin", "parts[0] * cos + parts[1] * sin"),
        (small_work, "before = BEFORE[p.plan.phases[run.number]]", 'before = "out"'),  # the factor of the norm before
        (small_work, "(tile, 0)], rows", "(tile * 0, 0)], rows"),  # the same tile for all
    ],
)
def test_a_wrong_kernel_is_noticed(place: ModuleType, old: str, new: str) -> None:
    kernel = wrong(place, old, new)
    with pytest.raises(AssertionError):
        check(CASES["three rows"], kernel)


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
        (small_work, "p.words(name).at[tiles]", "p.words(name).at[0]", CASES["three rows"], "rows are looked"),
        (stream, "run.turns_before * times", "(run.turn + 1) * times", ATTENDING["one token"], "rows are looked"),
        (
            attention,
            'tell(p.words("merge").at[k])',
            'tell(p.words("merge").at[0])',
            ATTENDING["one token"],
            "rows are looked",
        ),
        (stream, "MATRIX, run.letters", "MATRIX, run.letters - 1", ATTENDING["one token"], "letters are waited"),
        # The second warpgroup keeps its part.
        (attention, "units > p.group", "units > 2 * p.group", ATTENDING["one token"], "letters are waited"),
        # Squares of the layer's own turn.
        (small_work, "run.letters + (1 if", "run.letters + (0 if", ATTENDING["one token"], "letters are waited"),
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
        post = letters(case.plan, None)
        begin, caches, counts, post = refs = jax.tree.map(
            jax.new_ref, (given.begin, given.caches, jnp.zeros(COUNTS, jnp.int32), post)
        )
        given = given._replace(begin=begin, caches=caches, counts=counts, letters=post)
        out = module.decode_block(case.plan, given)
        return out.residual, out.query, *map(jax.freeze, jax.tree.leaves(refs))

    return jax.jit(call).trace(operands(case)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_lowers_for_a_gpu(case: Case) -> None:
    assert lowered(case).count("stablehlo.custom_call @mosaic_gpu") == 1


def test_lowers_in_64_bit_mode(x64: None) -> None:
    assert "mosaic_gpu" in lowered(ONE)
