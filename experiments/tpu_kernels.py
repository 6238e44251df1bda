"""The kernels that `tpu_compile` compiles: ours, and those that come with jax, at chosen shapes and block sizes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

# How the compiled kernels' names begin.
NAMES = ("flashspec_", "splash_", "flash_", "_flash_", "paged_attention")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Args:
      kernel: "flashspec" or one of `BUILDERS`.
      T: queries and keys, slots of a cache, or rows of a matrix.
      H: head size.
      block_q, block_kv: the blocks; 0 leaves them to our heuristic.
      backward: the gradients instead of the output.
      tokens, page: new tokens of a decoding call, and positions of a page (0 for a dense cache).
      gated: a matmul with a gate.
      checks: with Pallas's checks that copies stay inside of their arrays.
    """

    kernel: str
    T: int = 4096
    H: int = 128
    block_q: int = 0
    block_kv: int = 0
    backward: bool = False
    tokens: int = 1
    page: int = 0
    gated: bool = False
    checks: bool = False


type Program = tuple[Callable[..., Any], tuple[Any, ...]]

B, N, K = 16, 32, 8  # of decoding: rows, query heads, key/value heads
INPUTS, OUTPUTS = 4096, 14336  # of a matmul: those of the feed-forward layers of an 8B Llama


def build(case: Case, matrix_unit: int = 128) -> Program:
    """A function and the shapes of its arguments, bfloat16: one head of causal attention, a decoding step or a matmul.

    Args:
      case: what to build.
      matrix_unit: rows and columns of the chip's matrix unit.
    """
    call, arguments = _ours(case, matrix_unit) if case.kernel == "flashspec" else BUILDERS[case.kernel](case)
    return _checked(call, case.checks), arguments


def _checked(call: Callable[..., Any], checks: bool) -> Callable[..., Any]:
    """The function with the bounds checks of all its kernels compiled in, or none of them, whatever they ask for."""
    from jax.experimental.pallas import tpu as pltpu

    parameters = pltpu.CompilerParams

    def asked(**given: Any) -> Any:
        return parameters(**given | {"disable_bounds_checks": not checks})

    @functools.wraps(call)
    def with_terms(*arguments: Any) -> Any:
        with mock.patch.object(pltpu, "CompilerParams", asked):
            return call(*arguments)

    return with_terms


def chosen(case: Case, matrix_unit: int) -> Case:
    """The case with the blocks of attention that our heuristic chooses, where it is left to it."""
    if case.kernel != "flashspec" or case.block_q:
        return case
    config = _config(case, matrix_unit)
    return dataclasses.replace(case, block_q=config.block_q, block_kv=config.block_kv)


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _ours(case: Case, matrix_unit: int) -> Program:
    from pallas_kernels.tpu.attention_backward import attention_backward
    from pallas_kernels.tpu.attention_config import AttentionCall, AttentionStructure
    from pallas_kernels.tpu.attention_forward import attention_forward

    call = AttentionCall(scale=case.H**-0.5, limits=(None, 0))
    heads, row = _shape(1, 1, case.T, case.H), _shape(1, 1, case.T, dtype=jnp.float32)
    config = _config(case, matrix_unit)
    if not case.backward:

        def output(query: Any, key: Any, value: Any) -> Any:
            return attention_forward(query, key, value, AttentionStructure(), call=call, config=config)

        return output, (heads,) * 3

    def gradients(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return attention_backward(query, key, value, AttentionStructure(), *rest, call=call, config=config)

    return gradients, (*(heads,) * 4, row, row)


def _config(case: Case, matrix_unit: int) -> Any:
    """Our launch configuration: the heuristic's, at the blocks that the case asks for."""
    from pallas_kernels.tpu import attention_backward_config, attention_forward_config

    sizes = (case.T, case.T, case.H, case.H, 2)
    config: Any = attention_forward_config.heuristic(*sizes, matrix_unit=matrix_unit)
    if case.backward:
        config = attention_backward_config.heuristic(*sizes)
    if case.block_q:
        chunks = {"chunk_q": min(case.block_q, config.chunk_q), "chunk_kv": min(case.block_kv, config.chunk_kv)}
        config = dataclasses.replace(config, block_q=case.block_q, block_kv=case.block_kv, **chunks)
    return config


def _splash(case: Case) -> Program:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    q, kv = case.block_q, case.block_kv
    compute = min(kv, 512)  # of a block of 1024 keys, its faster choice on both chips
    blocks = splash.BlockSizes(q, kv, compute, q, kv, kv, q, kv)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.CausalMask((case.T, case.T))]), block_sizes=blocks
    )
    return _with_gradients(case, lambda *x: kernel(*x)), (_shape(1, case.T, case.H),) * 3


def _flash(case: Case) -> Program:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    q, kv = case.block_q, case.block_kv
    blocks = flash.BlockSizes(q, kv, kv, 1, q, kv, kv, q, kv, kv, q)
    call = lambda *x: flash.flash_attention(*x, causal=True, sm_scale=1.0, block_sizes=blocks)  # noqa: E731
    return _with_gradients(case, call), (_shape(1, 1, case.T, case.H),) * 3


def _with_gradients(case: Case, call: Callable[..., Any]) -> Callable[..., Any]:
    if not case.backward:
        return call
    return jax.grad(lambda *x: jnp.sum(call(*x).astype(jnp.float32)), argnums=(0, 1, 2))


def decode_block(case: Case) -> int:
    """Slots that our decode kernel copies at a time."""
    return _decode_config(case).block_kv


def _decode_config(case: Case) -> Any:
    from pallas_kernels.tpu.attention_decode_config import heuristic

    return heuristic(case.T, K, N // K * case.tokens, case.H, case.H, 2, max(case.page, 1))


def _our_decode(case: Case) -> Program:
    from pallas_kernels.tpu.attention_config import AttentionCall
    from pallas_kernels.tpu.attention_decode import Cache, DecodeRows, attention_decode

    config = _decode_config(case)
    memory = _shape(B, case.T, K, case.H)
    pages = None
    if case.page:
        memory = _shape(B * case.T // case.page, case.page, K, case.H)
        pages = _shape(B, case.T // case.page, dtype=jnp.int32)
    row, token = _shape(B, dtype=jnp.int32), _shape(B, case.tokens, dtype=jnp.int32)
    call = AttentionCall(scale=case.H**-0.5)
    arguments = _shape(B, case.tokens, N, case.H), Cache(memory, memory, pages), DecodeRows(row, row, token, token)
    return lambda *x: attention_decode(*x, call=call, config=config), arguments


def _paged(case: Case) -> Program:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    memory = _shape(K, B * case.T // case.page, case.page, case.H)
    arguments = _shape(B, N, case.H), memory, memory, _shape(B, dtype=jnp.int32)
    call = lambda *x: paged_attention(*x, pages_per_compute_block=case.block_kv // case.page)  # noqa: E731
    return call, (*arguments, _shape(B, case.T // case.page, dtype=jnp.int32))


def _matmul(case: Case) -> Program:
    from pallas_kernels.tpu.matmul_epilogue import matmul_epilogue
    from pallas_kernels.tpu.matmul_epilogue_config import heuristic

    config = heuristic(case.T, OUTPUTS, INPUTS, 2, 2 if case.gated else 1)
    weights, bias = _shape(INPUTS, OUTPUTS), _shape(OUTPUTS)
    operands = _shape(case.T, INPUTS), weights, bias, *([weights] if case.gated else [])

    def call(x: Any, w: Any, bias: Any, gate: Any = None) -> Any:
        activation = jax.nn.silu if case.gated else jax.nn.gelu
        return matmul_epilogue(x, w, bias, activation=activation, gate=gate, config=config)

    return call, operands


BUILDERS: dict[str, Callable[[Case], Program]] = {
    "splash": _splash,
    "flash_attention": _flash,
    "flashspec decode": _our_decode,
    "paged_attention": _paged,
    "flashspec matmul": _matmul,
}
