"""Hopper decoding by clusters in JAX's interpreter: against the same page of jnp, with wrong kernels that must fail."""

import contextlib
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from pallas_kernels.gpu.hopper import attention_decode_cluster as by_clusters
from pallas_kernels.gpu.hopper import attention_decode_part
from pallas_kernels.gpu.hopper.attention_decode_config import DecodeConfig
from tests.mutants import mutant
from tests.pallas_kernels.hopper import sass
from tests.pallas_kernels.hopper import test_attention_decode as of_two_kernels
from tests.pallas_kernels.hopper.interpreter import interpreted

SIZES = {"B": 1, "T": 2, "S": 256, "N": 2, "K": 1, "H": 128}
SINKS = [0.5, -1.0]

# Programs of a cluster; sizes, facts of the call, and its arrays besides query, keys and values.
CASES = {
    "lengths, of none and of fewer blocks than programs": (4, {"B": 3}, {}, {"length": [200, 0, 70], "sinks": SINKS}),
    "several blocks of a program": (2, {"S": 320, "T": 1}, {"soft_cap": 2.0}, {"length": [300]}),
    "window": (2, {}, {"left": 20}, {"length": [210]}),
    "pages": (3, {"B": 2, "page": 48, "S": 192}, {}, {"length": [70, 192]}),
    "tree": (2, {"T": 3}, {"is_tree": True, "left": 30},
             {"length": [200], "ancestors": of_two_kernels.ANCESTORS[:1], "oldest": [[167, 168, 168]]}),
    "statistics": (4, {"B": 2, "K": 2, "N": 4, "T": 1}, {"statistics": True}, {"length": [200, 0]}),
    "two warpgroups": (2, {"T": 16, "N": 5}, {}, {"length": [120], "real": [5]}),
    "vectors of 256": (2, {"H": 256}, {}, {"length": [120]}),
}  # fmt: skip
QUICK = ("lengths, of none and of fewer blocks than programs", "tree")


def case_of(name):
    cluster, sizes, facts, arrays = CASES[name]
    call, operands = of_two_kernels.make_case(SIZES | sizes, facts, arrays)
    return call._replace(config=DecodeConfig(block_keys=64, stages=2, cluster=cluster)), operands


def run(call, operands, kernel=by_clusters):
    with interpreted():
        return jax.jit(lambda operands: kernel.decode_by_clusters(call, operands))(operands)


def check(name, kernel=by_clusters):
    of_two_kernels.compare(run(*case_of(name), kernel), *case_of(name))


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_clusters_equal_the_twin(name):
    check(name)


@pytest.mark.parametrize(
    "edit",
    [
        ("sums, call.config.cluster)", "sums, call.config.cluster - 1)"),  # a part is left out
        pytest.param(("(first + i * workers, rows", "(first + i, rows"), marks=pytest.mark.slow),
        pytest.param(("for i in range(together)]", "for i in range(together - 1)]"), marks=pytest.mark.slow),
    ],
)
def test_a_wrong_merge_is_noticed(edit):
    with pytest.raises(AssertionError):
        check("tree", mutant(by_clusters, edit))


def of_equal_heads():
    """A call whose four query heads are one head several times: each of the programs merges one."""
    cluster = 4
    call, operands = of_two_kernels.make_case(SIZES | {"T": 1, "N": 4}, {"statistics": True}, {"length": [250]})
    query = jnp.broadcast_to(operands.query[:, :, :1], operands.query.shape)
    return call._replace(config=DecodeConfig(block_keys=64, stages=2, cluster=cluster)), operands._replace(query=query)


def differing_heads(kernel=by_clusters):
    return [np.sum(np.asarray(x) != np.asarray(x)[:, :, :1]) for x in run(*of_equal_heads(), kernel)]


def test_parts_are_merged_in_one_order_by_whichever_program():
    assert differing_heads() == [0, 0, 0]


def test_a_merge_that_begins_with_a_program_s_own_part_is_noticed():
    own_first = mutant(
        by_clusters,
        ("peek = _peek(part, ", "peek = _peek(part % 4, "),
        ("return _peek(part, ", "return _peek(part % 4, "),
        (
            "            merge_rows(call, parts, given, outputs, (start.b, start.k), index, size)",
            "            for r in range(4):\n"
            "                mine = parts._replace(first=r, end=r + 4)\n"
            "                merge = functools.partial(merge_rows, call, mine, given, outputs)\n"
            "                pl.when(start.block == r)(lambda merge=merge: merge((start.b, start.k), index, size))",
        ),
    )
    of_two_kernels.compare(run(*of_equal_heads(), own_first), *of_equal_heads())  # right but for rounding
    assert sum(differing_heads(own_first)) > 0


def slow_reader(original):
    """The first program of a cluster takes long over whatever it reads."""

    def wait(token, rank):
        time.sleep(0.05 * (int(rank) == 0))
        return token

    def call_get(*, token, mesh_location, **kwargs):
        if mesh_location is not None:
            (rank,) = mesh_location.block_coords
            token = callback.io_callback(wait, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, rank)
        return original(token=token, mesh_location=mesh_location, **kwargs)

    return call_get


@pytest.mark.slow
def test_no_program_goes_before_the_others_have_read():
    with mock.patch.object(gpu_callbacks, "call_get", slow_reader(gpu_callbacks.call_get)):
        check("statistics")


@pytest.mark.slow
def test_a_program_that_goes_at_once_is_noticed():
    leaves = mutant(by_clusters, ("    leave_cluster()\n", ""))
    with (
        mock.patch.object(gpu_callbacks, "call_get", slow_reader(gpu_callbacks.call_get)),
        pytest.raises(jax.errors.JaxRuntimeError, match="KeyError: HostAllocationKey"),
    ):
        check("statistics", leaves)


@contextlib.contextmanager
def copies_awaited():
    """Within it, kernels whose programs end before somebody has waited for each of their copies are noticed."""
    filled, missed = [], []
    arrive, leave = gpu_callbacks.AsyncCopyGmemToSmemTask.post_write, shared_memory.Barrier.deallocate

    def post_write(self, *args):
        filled.append(self.barrier)
        arrive(self, *args)

    def deallocate(self):
        seen = self.last_observed_phase_by_thread.values()
        if any(self is one for one in filled) and (self.arrivals_count or max(seen, default=0) < self.phase):
            missed.append(self)
        leave(self)

    with (
        mock.patch.object(gpu_callbacks.AsyncCopyGmemToSmemTask, "post_write", post_write),
        mock.patch.object(shared_memory.Barrier, "deallocate", deallocate),
    ):
        yield
    assert filled
    assert not missed


def copies_of(lengths, kernel=by_clusters):
    call, operands = of_two_kernels.make_case(SIZES | {"B": len(lengths), "T": 1}, {}, {"length": lengths})
    call = call._replace(config=DecodeConfig(block_keys=64, stages=2, cluster=2))
    with interpreted(), copies_awaited():
        jax.block_until_ready(jax.jit(lambda operands: kernel.decode_by_clusters(call, operands))(operands))


def test_no_program_ends_before_its_copies():
    copies_of([0, 100, 130, 256])


PART = ("Copies", "Rows", "Scratch", "attend", "inputs", "scratch_of")  # what a kernel takes of its part


def test_a_copy_that_nobody_waits_for_is_noticed():
    """One that lands in memory which belongs to another program by then."""
    hasty = mutant(
        attention_decode_part, ("if sure else (self.group == 0) & (index < self.blocks))", "if True else sure)")
    )
    with pytest.raises(AssertionError):
        copies_of([100], mutant(by_clusters, **{name: getattr(hasty, name) for name in PART}))


# How a kernel of clusters ends: the merge's last store, and the barrier.
LEAVING = """
    /*6cc0*/ STG.E.U16 desc[UR56][R2.64], R5
    /*6ce0*/ MEMBAR.ALL.CTA
    /*6cf0*/ MEMBAR.ALL.GPU
    /*6d00*/ ERRBAR
    /*6d10*/ CGAERRBAR
    /*6d20*/ UCGABAR_ARV
    /*6d30*/ UCGABAR_WAIT
"""


def test_programs_that_leave_while_others_read_are_noticed():
    """Those of `barrier.cluster.arrive.relaxed`, whose machine code has no MEMBAR: 8 x 2048, T = 5 crashed by it."""
    begins = "/*0600*/ UCGABAR_ARV\n/*0610*/ UCGABAR_WAIT\n"
    relaxed = "\n".join(line for line in LEAVING.splitlines() if "MEMBAR" not in line)
    assert [sass.relaxed_arrivals(begins + end) for end in ("", LEAVING, relaxed, LEAVING + relaxed)] == [0, 0, 1, 1]
    assert sass.relaxed_arrivals(relaxed.replace("UCGABAR_ARV", "")) == 0
