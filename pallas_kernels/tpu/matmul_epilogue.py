"""A matmul with its tail on TPUs: the sums stay in float32 in VMEM until activation, gate and residual have acted.

    phi(x W + b), or phi(x W_g + b_g) * (x W + b); + residual                              (section 33.4)

The grid is (rows, columns, contraction). A block of sums is finished at its last step and rounded once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.launch import cdiv, round_up, varying_alike
from pallas_kernels.tpu.attention_launch import VMEM_LIMIT
from pallas_kernels.tpu.matmul_epilogue_config import MatmulEpilogueConfig


def matmul_epilogue(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    activation: Callable[[Array], Array] | None = None,
    gate: Array | None = None,
    gate_bias: Array | None = None,
    residual: Array | None = None,
    config: MatmulEpilogueConfig,
    interpret: Any = False,
) -> Array:
    """phi(x W + b), or phi(x W_g + b_g) * (x W + b) with a gate; + residual.

    Args:
      x: [M, K], bfloat16 or float32; float32 uses the highest matmul precision.
      w: [K, N] in the dtype of x.
      bias: [N] in any floating dtype.
      activation: phi, elementwise on float32 and made of what a TPU kernel may hold; None for the identity.
      gate: W_g [K, N]; gate_bias: b_g [N].
      residual: [M, N] in any floating dtype.
      config: launch configuration.
      interpret: as in `pl.pallas_call`.

    Returns:
      [M, N] in the dtype of x, rounded once.
    """
    (M, K), N = x.shape, w.shape[1]
    operands = {"x": (x, "mk"), "w": (w, "kn")}
    optional = {"gate": (gate, "kn"), "bias": (bias, "n"), "gate_bias": (gate_bias, "n"), "residual": (residual, "mn")}
    operands |= {name: (array, axes) for name, (array, axes) in optional.items() if array is not None}
    blocks = {"m": config.block_m, "n": config.block_n, "k": config.block_k}
    arrays = varying_alike([_padded(array, axes, blocks) for array, axes in operands.values()])
    names = [*operands, "result", "sums", *(["gate_sums"] if gate is not None else [])]
    sums = pltpu.VMEM((config.block_m, config.block_n), jnp.float32)
    result = pl.pallas_call(
        lambda *refs: _kernel(activation, dict(zip(names, refs, strict=True))),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(cdiv(M, config.block_m), cdiv(N, config.block_n), cdiv(K, config.block_k)),
            in_specs=[_spec(axes, blocks) for _, axes in operands.values()],
            out_specs=_spec("mn", blocks),
            scratch_shapes=[sums] * (2 if gate is not None else 1),
        ),
        out_shape=jax.ShapeDtypeStruct(
            (round_up(M, config.block_m), round_up(N, config.block_n)),
            x.dtype,
            manual_axis_type=jax.typeof(arrays[0]).manual_axis_type,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="flashspec_matmul_epilogue",
        interpret=interpret,
    )(*arrays)
    return result[:M, :N]


def _padded(x: Array, axes: str, blocks: dict[str, int]) -> Array:
    """The array filled up with zeros to whole blocks, a vector as one row."""
    x = jnp.pad(x, [(0, -size % blocks[axis]) for axis, size in zip(axes, x.shape, strict=True)])
    return x[None] if x.ndim == 1 else x


def _spec(axes: str, blocks: dict[str, int]) -> pl.BlockSpec:
    def index(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
        at = {"m": m, "n": n, "k": k}
        return (0, at["n"]) if axes == "n" else tuple(at[axis] for axis in axes)

    return pl.BlockSpec((1, blocks["n"]) if axes == "n" else tuple(blocks[axis] for axis in axes), index)


def _kernel(activation: Callable[[Array], Array] | None, refs: dict[str, Any]) -> None:
    pairs = {"sums": "w", "gate_sums": "gate"}

    @pl.when(pl.program_id(2) == 0)
    def start() -> None:
        for name in pairs:
            if name in refs:
                refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

    x = refs["x"][...]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    for name, weights in pairs.items():
        if name in refs:
            w = refs[weights][...]
            refs[name][...] += jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def finish() -> None:
        z = _affine(refs, "sums", "bias")
        gated = _affine(refs, "gate_sums", "gate_bias") if "gate_sums" in refs else z
        y = gated if activation is None else activation(gated)
        if "gate_sums" in refs:
            y = y * z
        if "residual" in refs:
            y = y + refs["residual"][...].astype(jnp.float32)
        refs["result"][...] = y.astype(refs["result"].dtype)


def _affine(refs: dict[str, Any], sums: str, bias: str) -> Array:
    """Finished sums with their bias."""
    z = refs[sums][...]
    return z + jnp.broadcast_to(refs[bias][...].astype(jnp.float32), z.shape) if bias in refs else z
