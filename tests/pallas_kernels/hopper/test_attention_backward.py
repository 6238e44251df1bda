"""The Hopper backward in an interpreter against its equations in float64, its lowering, and the ranges of segments."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.hopper import (
    attention_backward,
    attention_backward_delta,
    attention_backward_keys,
    attention_backward_queries,
    attention_backward_sums,
    attention_backward_tile,
    attention_backward_wide,
    attention_mask,
)
from pallas_kernels.gpu.hopper.attention_backward_config import BackwardShape, heuristic
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, Bounds, SegmentIds
from tests.mutants import mutant
from tests.pallas_kernels.hopper.interpreter import interpreted, races_found

# Gradients of the kernel differ from exact ones by the rounding of P, dS and the result to bfloat16, 2^-9 each.
TOLERANCE = 2**-8


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: sizes, which queries see which keys, and the stages of its kernel."""

    B: int = 1
    T: int = 128
    S: int = 128
    N: int = 1
    K: int = 1
    H: int = 64
    left: int | None = None
    right: int | None = None
    q_start: int = 0
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    segments: bool = False
    soft_cap: float | None = None
    scale: float = 0.125
    stages: int = 2

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        """[B, 4]: first, last, q_length, kv_length."""
        columns = (
            self.q_start - (self.left or 0),
            self.q_start + (self.right or 0),
            self.q_lengths or self.T,
            self.kv_lengths or self.S,
        )
        return np.stack([np.broadcast_to(np.int32(column), self.B) for column in columns], axis=1)

    @functools.cached_property
    def segment_ids(self) -> SegmentIds | None:
        if not self.segments:
            return None
        return SegmentIds(
            *(jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32) // 50, (self.B, n)) for n in (self.T, self.S))
        )

    @functools.cached_property
    def visible(self) -> np.ndarray:
        """bool [B, 1, T, S]."""
        q, k = np.arange(self.T)[:, None], np.arange(self.S)[None, :]
        first, last, q_length, kv_length = (column[:, None, None] for column in self.bounds.T)
        visible = (q < q_length) & (k < kv_length)
        if self.left is not None:
            visible &= k - q >= first
        if self.right is not None:
            visible &= k - q <= last
        if self.segment_ids is not None:
            q_ids, kv_ids = map(np.asarray, self.segment_ids)
            visible = visible & (q_ids[:, :, None] == kv_ids[:, None, :])
        return visible[:, None]

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Query, key, value and the gradient of the output, bfloat16."""
        random = np.random.default_rng(0)
        heads = ((self.T, self.N), (self.S, self.K), (self.S, self.K), (self.T, self.N))
        return tuple(random.standard_normal((self.B, *size, self.H)).astype(jnp.bfloat16) for size in heads)


def exact(case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """(dQ, dK, dV), lse and delta by eq. 33.6 to 33.8 in float64; a query without keys has lse = -inf."""
    query, key, value, gradient = (np.asarray(x, np.float64) for x in case.arrays)
    G = case.N // case.K
    keys, values = (np.repeat(x, G, axis=2) for x in (key, value))
    slope = np.ones(())
    scores = case.scale * np.einsum("btnh,bsnh->bnts", query, keys)
    if case.soft_cap is not None:
        slope = 1 - np.tanh(scores / case.soft_cap) ** 2
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    weights = np.where(case.visible, np.exp(scores), 0)
    normaliser = weights.sum(axis=3)
    p = weights / np.where(normaliser == 0, 1, normaliser)[..., None]
    output = np.einsum("bnts,bsnh->btnh", p, values)
    delta = np.einsum("btnh,btnh->bnt", output, gradient)
    ds = case.scale * slope * p * (np.einsum("btnh,bsnh->bnts", gradient, values) - delta[..., None])
    groups = (case.B, case.S, case.K, G, case.H)
    dq = np.einsum("bnts,bsnh->btnh", ds, keys)
    dk = np.einsum("bnts,btnh->bsnh", ds, query).reshape(groups).sum(axis=3)
    dv = np.einsum("bnts,btnh->bsnh", p, gradient).reshape(groups).sum(axis=3)
    with np.errstate(divide="ignore"):
        return [dq, dk, dv], np.log(normaliser), delta


def mask_of(case: Case, *, static: bool) -> AttentionMask:
    bounds = Bounds(*(int(x) for x in case.bounds[0])) if static else None
    return AttentionMask(case.left is not None, case.right is not None, case.segments, bounds)


def launch(case: Case, *, deterministic: bool, static: bool, module: Any = attention_backward) -> Any:
    """The kernels as a function of (query, key, value, gradient, lse, delta)."""
    config = heuristic(BackwardShape(case.B, case.T, case.S, case.N, case.K, case.H, case.H))
    return functools.partial(
        module.attention_backward,
        bounds=None if static else jnp.asarray(case.bounds),
        segments=case.segment_ids,
        mask=mask_of(case, static=static),
        scale=case.scale,
        soft_cap=case.soft_cap,
        deterministic=deterministic,
        config=dataclasses.replace(config, stages=case.stages),
    )


def errors(
    case: Case, *, deterministic: bool, module: Any = attention_backward, where: Any = interpreted
) -> list[float]:
    """Relative errors of dQ, dK and dV; NaN is one."""
    expected, lse, delta = exact(case)
    rows = (jnp.asarray(x, jnp.float32) for x in (lse, delta))
    call = launch(case, deterministic=deterministic, static=case.B == 1, module=module)
    with where():
        results = jax.jit(call)(*case.arrays, *rows)
    results = [np.asarray(x, np.float64) for x in results]
    return [np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-9) for x, y in zip(results, expected, strict=True)]


RAGGED = Case(B=2, T=72, S=152, left=40, right=10, q_start=60, q_lengths=(0, 60), kv_lengths=(151, 100))
CASES = {
    "causal, grouped, T != S": Case(T=72, S=144, N=2, right=0, q_start=70),
    "window and lengths": RAGGED,
    "H = 128": Case(T=136, H=128, right=0),
    "H = 256": Case(T=136, S=136, N=2, H=256, right=0),
    "segments": Case(T=160, S=160, segments=True, right=0),
    "soft cap": Case(T=64, S=40, soft_cap=0.5, scale=-0.3),
}
FIRST = ("causal, grouped, T != S, fused", "window and lengths, deterministic")  # the others take too long


def parameters(table: dict[str, Any], first: tuple[str, ...]) -> Any:
    return [pytest.param(x, id=name, marks=() if name in first else pytest.mark.slow) for name, x in table.items()]


GRADIENTS = {
    f"{name}, {kind}": (case, kind == "deterministic")
    for name, case in CASES.items()
    for kind in ("fused", "deterministic")
}


@pytest.mark.parametrize("call", parameters(GRADIENTS, FIRST))
def test_gradients(call):
    case, deterministic = call
    assert max(errors(case, deterministic=deterministic)) < TOLERANCE


def keys_mutant(*edits: tuple[str, str], **names: Any) -> Any:
    return mutant(attention_backward, KeyBlocks=mutant(attention_backward_keys, *edits, **names).KeyBlocks)


def sums_mutant(*edits: tuple[str, str]) -> Any:
    return keys_mutant(add_fragments=mutant(attention_backward_sums, *edits).add_fragments)


def rows_mutant(*edits: tuple[str, str]) -> Any:
    return mutant(attention_backward, rows_of=mutant(attention_backward_sums, *edits).rows_of)


def queries_mutant(*edits: tuple[str, str]) -> Any:
    return mutant(attention_backward, QueryBlocks=mutant(attention_backward_queries, *edits).QueryBlocks)


def wide_mutant(*edits: tuple[str, str]) -> Any:
    return mutant(attention_backward, WideKeyBlocks=mutant(attention_backward_wide, *edits).WideKeyBlocks)


USUAL = ("delta left out", "sums of dQ in another order", "empty rows")
WRONG = {
    "delta left out": (CASES["H = 128"], keys_mutant(("(dp - (self._delta(slot, shape) if late else delta))", "dp"))),
    "dK without the scale": (CASES["H = 128"], keys_mutant(("(dk * self.scores.scale)", "dk"))),
    "group's other head": (
        CASES["causal, grouped, T != S"],
        keys_mutant(("* self.shape.G + member", "* self.shape.G")),
    ),
    "tile of dQ of the other warpgroup": (
        CASES["causal, grouped, T != S"],
        keys_mutant(("lax.div(q_start, TILE) + rows", "lax.div(q_start, TILE)")),
    ),
    "sums of dQ that are overwritten": (
        CASES["causal, grouped, T != S"],
        sums_mutant(('"red.relaxed.gpu.global.add.v4', '"st.relaxed.gpu.global.v4')),
    ),
    "sums of dQ in another order": (
        CASES["causal, grouped, T != S"],
        sums_mutant(("for n in range(2)]", "for n in (1, 0)]")),
    ),
    "dQ without the scale": (CASES["causal, grouped, T != S"], rows_mutant(("(part * scale)", "part"))),
    "dQ read in another order": (
        CASES["H = 128"],
        rows_mutant(("numbers[2 * n : 2 * n + 2]", "numbers[2 - 2 * n : 4 - 2 * n]")),
    ),
    "full block one too long": (
        CASES["H = 128"],
        keys_mutant(
            met=mutant(
                attention_backward_tile, ("lax.div(indices[0] + (size - 1), size)", "lax.div(indices[0], size)")
            ).met
        ),
    ),
    "slope of the soft cap": (CASES["soft cap"], keys_mutant(("p if slope is None else p * slope", "p"))),
    "H = 256: dK scaled as dV": (CASES["H = 256"], wide_mutant(("self.dk, self.scores.scale)", "self.dk, 1.0)"))),
    "empty rows": (
        RAGGED,
        mutant(attention_backward, ("jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)", "lse * LOG2E")),
    ),
    "ids of other rows": (
        CASES["segments"],
        keys_mutant(("self.gmem.q_ids, block.batch, q_start", "self.gmem.q_ids, block.batch, 0 * q_start")),
    ),
}


@pytest.mark.parametrize("wrong", parameters(WRONG, USUAL))
@pytest.mark.filterwarnings("ignore:invalid value")  # a wrong kernel may well multiply infinities
def test_wrong_kernels_fail(wrong):
    case, module = wrong
    assert not max(errors(case, deterministic=False, module=module)) < TOLERANCE


# Where warpgroups meet, and a kernel in which they do not. No stage is used twice: the interpreter asks for a fence
# between reading a stage and copying into it, which no kernel has.
LONG, WIDE = Case(T=192, H=128, stages=3), Case(T=128, S=64, H=256)
APART = {
    "before dQ": (LONG, keys_mutant(("            meet()\n", "            plgpu.commit_smem()\n"))),
    "before K is overwritten": (LONG, keys_mutant(("            meet()  # The", "            pass  # The"))),
    "at H = 256": (WIDE, wide_mutant(("        meet()", "        pass"))),
}


@pytest.mark.parametrize("apart", parameters(APART, ("before dQ",)))
@pytest.mark.filterwarnings("ignore:invalid value")  # what was not stored yet is NaN
def test_warpgroups_that_do_not_meet_race(apart):
    """Found from the order of accesses alone, whatever comes out; with the meeting there is no race."""
    case, wrong = apart
    detecting = functools.partial(interpreted, detect_races=True)
    errors(case, deterministic=False, module=wrong, where=detecting)
    assert races_found()
    assert max(errors(case, deterministic=False, where=detecting)) < TOLERANCE
    assert not races_found()


def test_wrong_query_kernel_fails():
    wrong = queries_mutant(("(dq * self.scores.scale)", "dq"))
    assert not max(errors(CASES["H = 128"], deterministic=True, module=wrong)) < TOLERANCE


@pytest.mark.parametrize(("shape", "H"), [((1, 136, 2, 128), 128), ((2, 72, 1, 64), 64)])
def test_delta_and_zeros(shape, H):
    """Rows past T are there, and 0."""
    with interpreted(detect_races=True):
        delta, zeros = delta_and_zeros(shape, H)
    assert not races_found()
    B, T, N, _ = shape
    blocks = -(-T // 128)
    assert delta.shape == (B, N, 128 * blocks)
    assert zeros.shape == (B, N, 2 * blocks, H // 64, 64, 64)
    assert not np.asarray(zeros).any()
    np.testing.assert_allclose(delta, exact_delta(shape), atol=1e-5)


def delta_and_zeros(shape: tuple[int, ...], H: int, module: Any = attention_backward_delta) -> Any:
    return jax.jit(functools.partial(module.delta_and_zeros, head_size=H))(*factors(shape))


def factors(shape: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.standard_normal(shape).astype(jnp.bfloat16) for _ in range(2)]


def exact_delta(shape: tuple[int, ...]) -> np.ndarray:
    sums = np.einsum("btnh,btnh->bnt", *(x.astype(np.float64) for x in factors(shape)))
    return np.pad(sums, ((0, 0), (0, 0), (0, -shape[1] % 128)))


@pytest.mark.parametrize(
    "edit",
    [
        ("for column in range(0, Hv, TILE)", "for column in range(0, TILE, TILE)"),
        ("delta.at[batch, head", "delta.at[batch, 0"),
    ],
)
def test_wrong_delta_fails(edit):
    shape = (1, 136, 2, 128)
    with interpreted():
        delta, _ = delta_and_zeros(shape, 128, mutant(attention_backward_delta, edit))
    assert not np.allclose(delta, exact_delta(shape), atol=1e-5)


def test_zeros_that_are_given_are_added_to():
    """That the sums start from them shows where they are no zeros."""
    case = CASES["H = 128"]
    expected, lse, delta = exact(case)
    rows = [jnp.asarray(x, jnp.float32) for x in (lse, delta)]
    call = launch(case, deterministic=False, static=True)
    shape = BackwardShape(case.B, case.T, case.S, case.N, case.K, case.H, case.H)
    with interpreted():
        dq, _, _ = jax.jit(call)(*case.arrays, *rows, dq=jnp.full(shape.dq_tiles, 1 / case.scale))
    np.testing.assert_allclose(np.asarray(dq, np.float64) - 1, expected[0], atol=0.05)


def test_what_delta_does_not_take():
    x = jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"`output_gradient`: expected bfloat16 \[1, 8, 1, 64\] as `output`, got float32"
    ):
        attention_backward_delta.delta_and_zeros(x, x.astype(jnp.float32), head_size=64)
    with pytest.raises(ValueError, match="`head_size`: expected a multiple of 64, got 80"):
        attention_backward_delta.delta_and_zeros(x, x, head_size=80)
    for wrong, got in ((x[0], r"bfloat16 \[8, 1, 64\]"), (x.astype(jnp.float32), r"float32 \[1, 8, 1, 64\]")):
        with pytest.raises(ValueError, match=rf"`output`: expected bfloat16 or float16 \[B, T, N, Hv\], got {got}"):
            attention_backward_delta.delta_and_zeros(wrong, wrong, head_size=64)


@pytest.mark.parametrize(
    ("deterministic", "dq", "message"),
    [
        (
            False,
            ((1, 1, 3, 2, 64, 64), jnp.float32),
            r"expected float32 \[1, 1, 4, 2, 64, 64\], got float32 \[1, 1, 3,",
        ),
        (False, ((1, 1, 4, 2, 64, 64), jnp.bfloat16), "expected float32 .* got bfloat16"),
        (True, ((1, 1, 4, 2, 64, 64), jnp.float32), "expected None where dQ has a kernel of its own"),
    ],
)
def test_zeros_that_dq_cannot_be_added_to(deterministic, dq, message):
    """Additions would go past their end, or nowhere."""
    case = CASES["H = 128"]
    rows = [jax.ShapeDtypeStruct((case.B, case.N, case.T), jnp.float32)] * 2
    with pytest.raises(ValueError, match=f"`dq`: {message}"):
        jax.eval_shape(
            launch(case, deterministic=deterministic, static=True), *case.arrays, *rows, dq=jax.ShapeDtypeStruct(*dq)
        )


@pytest.mark.parametrize(("H", "deterministic"), [(64, False), (128, False), (64, True), (128, True), (256, False)])
def test_lowers_for_cuda(H, deterministic):
    """Both dtypes, bounds that are operands, and segments, down to the compiler of the GPU."""
    case = Case(B=2, T=296, S=200, N=4, K=2, H=H, left=5, right=3, segments=True)
    text = lowered(case, deterministic, jnp.bfloat16 if H == 64 else jnp.float16)
    assert text.count("mosaic_gpu_v2") == 2


def test_lowers_in_64_bit_mode(x64):
    case = Case(B=2, T=296, S=200, N=4, K=2, left=5, right=3, segments=True)
    assert "mosaic_gpu_v2" in lowered(case, False, jnp.bfloat16)


def lowered(case: Case, deterministic: bool, dtype: Any) -> str:
    tensors = [jax.ShapeDtypeStruct(x.shape, dtype) for x in case.arrays]
    rows = [jax.ShapeDtypeStruct((case.B, case.N, case.T), jnp.float32)] * 2
    call = launch(case, deterministic=deterministic, static=False)
    return jax.jit(call).trace(*tensors, *rows).lower(lowering_platforms=("cuda",)).as_text()


def test_nothing_to_do():
    """No query or no key: gradients are 0, and no kernel is launched."""
    for case in (Case(T=0), Case(S=0), Case(B=0)):
        tensors = [jnp.zeros(x.shape, jnp.bfloat16) for x in case.arrays]
        rows = [jnp.zeros((case.B, case.N, case.T), jnp.float32)] * 2
        results = launch(dataclasses.replace(case, B=1), deterministic=False, static=True)(*tensors, *rows)
        assert [x.shape for x in results] == [x.shape for x in tensors[:3]]
        assert not any(np.asarray(x).any() for x in results)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ([3, 3, 3, 3], [1, 3, 3, 5], [[1, 3, 1, 3], [1, 3, 1, 3]]),
        ([0, 1, 1, 1], [0, 0, 1, 1], [[0, 4, 0, 0], [2, 4, 2, 4]]),
        ([1, 1, 9], [1, 2, 1, 1], [[0, 4, 0, 0], [0, 0, 0, 0]]),
    ],
    ids=["one id", "two ids", "no run, no partner"],
)
def test_segment_ranges(own, other, expected):
    """Blocks of 2 ids."""
    ids = (jnp.asarray([x], jnp.int32) for x in (own, other))
    assert attention_mask.segment_ranges(*ids, 2)[0].tolist() == expected


BOUNDS = [Bounds(first, last, 8, length) for first in (-3, 0, 2) for last in (-1, 0, 2) for length in (0, 5, 8, 12)]


def misjudged(module: Any = attention_mask) -> list[Bounds]:
    """Bounds of which it is not known rightly, without segments, whether every query sees a key."""
    i, j = np.arange(8)[:, None], np.arange(12)[None]
    masks = [module.AttentionMask(left, right, False, x) for left in (0, 1) for right in (0, 1) for x in BOUNDS]
    return [m for m in masks if m.shows_every_query_a_key() != bool(m.tile(m.bounds, i, j).any(axis=1).all())]


def test_what_shows_every_query_a_key():
    assert not misjudged()
    for unknown in (AttentionMask(), AttentionMask(segments=True, bounds=Bounds(0, 0, 8, 8))):
        assert not unknown.shows_every_query_a_key()


@pytest.mark.parametrize("part", ["bounds.last >= 0", "bounds.first + bounds.q_length <= bounds.kv_length"])
def test_wrong_rules_for_a_key_fail(part):
    assert misjudged(mutant(attention_mask, (part, "True")))


def test_wrong_segment_ranges_fail():
    """A block of two ids, or a run with a gap, is not full."""
    wrong = mutant(attention_mask, ("(ids == low) & (low == high)", "ids == low"))
    ids = (jnp.asarray([x], jnp.int32) for x in ([0, 1, 1, 1], [0, 0, 1, 1]))
    assert wrong.segment_ranges(*ids, 2)[0].tolist() != [[0, 4, 0, 0], [2, 4, 2, 4]]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "deterministic"])
@pytest.mark.parametrize("case", [*CASES.values(), Case(B=2, T=1000, S=1200, N=4, K=2, H=128, right=0, q_start=200)])
def test_gradients_on_a_gpu(case, deterministic):
    assert max(errors(case, deterministic=deterministic, where=contextlib.nullcontext)) < TOLERANCE


@pytest.mark.gpu
def test_deterministic_gradients_are_bit_equal_from_run_to_run():
    case = Case(B=2, T=2048, S=2048, N=8, K=4, H=128, right=0)
    rows = (jnp.full((case.B, case.N, case.T), x, jnp.float32) for x in (8.0, 0.5))
    call = jax.jit(launch(case, deterministic=True, static=True))
    operands = [jnp.asarray(x) for x in (*case.arrays, *rows)]
    first, *others = ([np.asarray(x) for x in call(*operands)] for _ in range(5))
    assert all(np.array_equal(x, y) for other in others for x, y in zip(first, other, strict=True))
