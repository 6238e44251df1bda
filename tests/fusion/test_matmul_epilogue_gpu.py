"""A matmul with its tail on an NVIDIA GPU, at the sizes that matter there (python -m pytest -m gpu)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.fusion import matmul_epilogue

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [1, 16, 257])
@pytest.mark.parametrize("gated", [False, True])
def test_every_implementation_that_is_chosen_equals_the_reference(dtype, rows, gated):
    keys = jax.random.split(jax.random.key(rows), 5)
    x, w, gate, residual = (
        jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
        for key, shape, scale in zip(
            keys, ((rows, 512), (512, 768), (512, 768), (rows, 768)), (1, 0.04, 0.04, 1), strict=False
        )
    )
    bias = jax.random.normal(keys[4], (768,), dtype)
    options = {"activation": "silu", "residual": residual, "gate": gate if gated else None}

    def loss(implementation, x, w):
        y = matmul_epilogue(x, w, bias, implementation=implementation, **options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    results = [
        jax.jit(jax.value_and_grad(lambda x, w, name=name: loss(name, x, w), argnums=(0, 1), has_aux=True))(x, w)
        for name in (None, "reference")
    ]
    unit = float(jnp.finfo(dtype).eps)
    for got, want in zip(*map(jax.tree.leaves, [(r[0][1], r[1]) for r in results]), strict=True):
        got, want = (np.asarray(array, np.float32) for array in (got, want))
        assert np.all(np.abs(got - want) <= 4 * unit * np.abs(want).max())
