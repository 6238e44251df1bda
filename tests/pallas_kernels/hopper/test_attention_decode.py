"""The Hopper decode kernel in JAX's interpreter, against a page of plain jnp; with wrong kernels that must fail."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.hopper import attention_decode, attention_decode_part
from pallas_kernels.gpu.hopper.attention_decode_config import (
    NOWHERE,
    DecodeCall,
    DecodeConfig,
    DecodeOperands,
    DecodeShape,
)
from tests.attention import decode_twin
from tests.mutants import mutant
from tests.pallas_kernels.hopper.interpreter import interpreted

CONFIG = DecodeConfig(block_keys=64, stages=2, programs=6, least_blocks=1, merge_loads=2)
SIZES = {"B": 2, "T": 2, "S": 128, "N": 4, "K": 2, "H": 64}
TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
ANCESTORS = np.broadcast_to((TREE << np.arange(3)).sum(axis=1), (2, 3))

# Sizes, facts of the call, and its arrays besides query, keys and values.
CASES = {
    "a whole row and one in parts": ({"H": 128}, {}, {"length": [70, 1], "sinks": [0.5, -1.0, 2.0, 0.0]}),
    "lengths": ({}, {}, {"length": [70, 0]}),
    "window": ({}, {"left": 20, "soft_cap": 2.0}, {"length": [120, 128], "sinks": [0.5, -1.0, 2.0, 0.0]}),
    "pages": ({"page": 48, "S": 144}, {}, {"length": [70, 144]}),
    "tree": ({"T": 3}, {"is_tree": True, "left": 30}, {"length": [120, 70], "ancestors": ANCESTORS,
                                                       "oldest": [[87, 88, 88], [37, 38, 38]]}),
    "two warpgroups": ({"T": 16, "N": 10}, {}, {"length": [120, 20], "real": [16, 5]}),
    "finished by two warpgroups": ({"T": 16, "N": 10, "H": 128}, {}, {"length": [120, 20], "real": [16, 5]}),
    "parts of one block": ({}, {"split": 1}, {"length": [120, 70]}),
    "statistics": ({"H": 128, "T": 1}, {"statistics": True}, {"length": [120, 70]}),
}  # fmt: skip
QUICK = ("a whole row and one in parts", "tree")


def case_of(name):
    sizes, facts, arrays = CASES[name]
    return make_case(SIZES | sizes, facts, arrays)


def make_case(sizes, facts, arrays):
    """A call and its operands; what no query may see is NaN."""
    shape = DecodeShape(**sizes)
    rng = np.random.default_rng(0)
    query = rng.normal(size=(shape.B, shape.T, shape.N, shape.H))
    live = np.arange(shape.S)[None, :] < np.asarray(arrays["length"])[:, None]
    keys = [
        np.where(live[:, :, None, None], rng.normal(size=(shape.B, shape.S, shape.K, shape.H)), np.nan) for _ in "kv"
    ]
    given = {key: jnp.asarray(x, jnp.float32 if key == "sinks" else jnp.int32) for key, x in arrays.items()}
    if shape.page is not None:
        count = shape.S // shape.page
        order = rng.permutation(shape.B * count)
        keys = [x.reshape(shape.B * count, shape.page, shape.K, shape.H)[np.argsort(order)] for x in keys]
        used = np.arange(count)[None, :] * shape.page < np.asarray(arrays["length"])[:, None]
        given["page_table"] = jnp.asarray(np.where(used, order.reshape(shape.B, count), NOWHERE), jnp.int32)
    tensors = (jnp.asarray(x, jnp.bfloat16) for x in (query, *keys))
    return DecodeCall(shape, CONFIG, shape.H**-0.5, **facts), DecodeOperands(*tensors, **given)


def check(case, kernel=attention_decode):
    call, operands = case
    with interpreted():
        got = jax.jit(lambda operands: kernel.decode(call, operands))(operands)
    compare(got, *case)


def compare(got, call, operands):
    for x, y in zip(got, decode_twin.decode(call, operands), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_the_kernel_equals_its_twin(name):
    check(case_of(name))


def wrong(edit):
    """The kernel with a part of it edited: what parts do, or what becomes of them."""
    if edit[0] in inspect.getsource(attention_decode_part):
        part = mutant(attention_decode_part, edit)
        return mutant(attention_decode, Rows=part.Rows, attend=part.attend)
    return mutant(attention_decode, edit)


@pytest.mark.parametrize(
    "edit",
    [
        ("seen = at <= across(own, shape)", "seen = at < across(own, shape)"),
        ("(place.block == 0) & (blocks == place.blocks)", "(place.block == 0)"),
        pytest.param(("decay = jnp.exp2(old - shift)", "decay = jnp.exp2(old - old)"), marks=pytest.mark.slow),
        pytest.param(("at < self.length", "at <= self.length"), marks=pytest.mark.slow),
    ],
)
def test_a_wrong_kernel_is_noticed(edit):
    with pytest.raises(AssertionError):
        check(case_of("a whole row and one in parts"), wrong(edit))


def test_rings_are_read_in_any_order():
    call, operands = case_of("lengths")
    order = np.stack([np.random.default_rng(b).permutation(call.shape.S) for b in range(2)])
    position = np.where(order < np.asarray(operands.length)[:, None], order, NOWHERE)
    key, value = (jnp.stack([x[b][order[b]] for b in range(2)]) for x in (operands.key, operands.value))
    ring = operands._replace(key=key, value=value, positions=jnp.asarray(position, jnp.int32))
    check((call._replace(is_ring=True), ring))
