"""Launch configurations of the TPU attention kernels, as arithmetic."""

import itertools
from typing import Any

import pytest

from pallas_kernels.launch import round_up
from pallas_kernels.tpu import attention_backward_config as backward
from pallas_kernels.tpu import attention_forward_config as forward
from pallas_kernels.tpu.attention_config import VMEM_BUDGET, fit_block

SIZES = (1, 127, 128, 1000, 1100, 4096, 32768)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("largest", [128, 512, 1024])
def test_blocks_hold_an_axis_without_much_filler(size: int, largest: int) -> None:
    block = fit_block(size, largest)
    assert block <= largest
    assert block % 128 == 0
    assert 3 * round_up(size, block) < 4 * round_up(size, 128)
    assert round_up(1100, 1024) >= 4 / 3 * round_up(1100, 128)  # what the largest block would do to 1,100


@pytest.mark.parametrize(("T", "S"), list(itertools.product(SIZES, (128, 4096))))
@pytest.mark.parametrize("H", [64, 256, 512])
def test_heuristics_fit_in_vmem(T: int, S: int, H: int) -> None:
    for itemsize, bias_bytes in ((2, 0), (4, 4)):
        config = forward.heuristic(T, S, H, H, itemsize, bias_bytes)
        assert forward.vmem_bytes(config, H, H, itemsize, bias_bytes) <= VMEM_BUDGET
        wide = forward.heuristic(T, S, H, H, itemsize, bias_bytes, matrix_unit=256)
        assert wide.chunk_q >= config.chunk_q
        other = backward.heuristic(T, S, H, H, itemsize, bias_bytes)
        rest = backward.vmem_bytes(other, T, H, H, itemsize, bias_bytes) - backward.query_gradient_bytes(T, H)
        assert rest <= VMEM_BUDGET // 2
    assert forward.heuristic(4096, 4096, 128, 128, 2) in forward.candidates(4096, 4096, 128, 128, 2)
    assert backward.heuristic(4096, 4096, 128, 128, 2) in backward.candidates(4096, 4096, 128, 128, 2)


@pytest.mark.parametrize("config", [forward.AttentionForwardConfig, backward.AttentionBackwardConfig])
def test_illegal_blocks_are_refused(config: Any) -> None:
    for sizes in ((100, 128, 100, 128), (256, 128, 384, 128), (128, 0, 128, 128)):
        with pytest.raises(ValueError, match=r"`block_(q|kv)`: expected a multiple of 128"):
            config(*sizes)
