"""What the fused decoder step on Hopper takes, and settings that cannot be."""

import jax
import pytest

from pallas_kernels.gpu.hopper.decode_block_config import (
    PHASES,
    PRODUCTS,
    AttentionForm,
    BlockConfig,
    BlockPlan,
    BlockShape,
    Heads,
    heuristic,
    refusals,
)
from tests.pallas_kernels.hopper.decode_block_cases import ONE, SCALE


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
