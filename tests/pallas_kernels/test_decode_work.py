"""How the decode kernel shares out blocks: every block once, in parts that the merge finds again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.hopper import attention_decode_config as config
from pallas_kernels.gpu.hopper.attention_decode_work import ClusterWork, Work, parts_of_a_head, programs_of_a_head

B, K, S, KEYS = 5, 3, 1024, 64


def call_of(*, split=None, programs=7, left=None, is_ring=False, batch=B):
    shape = config.DecodeShape(batch, 2, S, 6, K, 64)
    launch = config.DecodeConfig(block_keys=KEYS, programs=programs, least_blocks=2)
    return config.DecodeCall(shape, launch, 1.0, left=left, split=split, is_ring=is_ring)


@functools.partial(jax.jit, static_argnums=0)
def walk(call, lengths, program):
    """The parts of one program, as its kernel runs through them: part, pair, first block, blocks; -1 past the last."""
    work = Work(call, lengths, None)
    share = work.share(program)

    def step(carry, _):
        done, index, place = carry
        run = share.run(place, done)
        row = jnp.stack([share.part + index, place.b * K + place.k, place.first + place.block, run])
        row = jnp.where(done < share.blocks, row, -1)
        return (done + run, index + 1, work.after(place, run)), row

    start = jnp.int32(0), jnp.int32(0), share.start
    return jax.lax.scan(step, start, length=call.shape.B * K * S // KEYS)[1]


def parts_of(call, lengths):
    rows = [
        np.asarray(walk(call, jnp.asarray(lengths, jnp.int32), jnp.int32(p)))
        for p in range(K * programs_of_a_head(call))
    ]
    return [tuple(map(int, row)) for program in rows for row in program if row[0] >= 0]


def assert_covers(parts, lengths, call, first=None):
    """Every block of every pair lies in exactly one part; the parts of a pair have neighbouring numbers."""
    seen = {}
    for part, pair, block, run in parts:
        assert run > 0
        for i in range(run):
            assert (pair, block + i) not in seen
            seen[pair, block + i] = part
    blocks = [max(1, -(-min(length, S) // KEYS)) for length in lengths]
    first = [0] * len(lengths) if first is None else first
    assert set(seen) == {(b * K + k, i) for b, n in enumerate(blocks) for k in range(K) for i in range(first[b], n)}
    numbers = [part for part, *_ in parts]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < K * parts_of_a_head(call)
    for pair in range(len(lengths) * K):
        mine = [part for part, other, *_ in parts if other == pair]
        assert mine == list(range(mine[0], mine[0] + len(mine)))


LENGTHS = {
    "ragged": (700, 0, 64, 1024, 65),
    "equal": (640,) * B,
    "short": (1,) * B,
    "too long": (5000, 1, 1, 1, 1),
    "none": (0,) * B,
}


@pytest.mark.parametrize("split", [None, 1, 3, 16])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_block_lies_in_one_part(lengths, split):
    for programs in (1, 7, 64):
        call = call_of(split=split, programs=programs)
        assert_covers(parts_of(call, lengths), lengths, call)


def test_a_lost_block_is_noticed():
    call = call_of()
    parts = parts_of(call, LENGTHS["ragged"])
    (part, pair, block, run), *rest = parts
    for wrong in ([*parts, parts[-1]], [(part, pair, block, run - 1), *rest], rest):
        with pytest.raises((AssertionError, IndexError)):
            assert_covers(wrong, LENGTHS["ragged"], call)


def test_a_window_leaves_out_blocks():
    call = call_of(left=100)
    lengths = (700, 0, 64, 1024, 65)
    first = [max(0, length - 2 - 100) // KEYS for length in lengths]
    assert_covers(parts_of(call, lengths), lengths, call, first)


def test_many_rows_and_one():
    for batch in (1, 37):
        lengths = tuple(np.random.default_rng(batch).integers(0, S + 1, batch).tolist())
        call = call_of(batch=batch)
        assert_covers(parts_of(call, lengths), lengths, call)


def test_parts_of_a_given_size_do_not_depend_on_the_neighbours():
    call = call_of(split=3)
    alone = [part[2:] for part in parts_of(call_of(split=3, batch=1), (700,)) if part[1] == 0]
    for others in ((0, 0, 0, 0), (1024, 3, 77, 900)):
        assert [part[2:] for part in parts_of(call, (700, *others)) if part[1] == 0] == alone
    free = call_of()
    cuts = [[p[2:] for p in parts_of(free, (700, *others)) if p[1] == 0] for others in ((0,) * 4, (1024, 3, 77, 900))]
    assert cuts[0] != cuts[1]  # the control: without a given size the cut follows the batch


def test_programs_are_equally_busy():
    call = call_of()
    for lengths in LENGTHS.values():
        blocks = sum(max(1, -(-min(n, S) // KEYS)) for n in lengths) * K
        work = [np.asarray(walk(call, jnp.asarray(lengths, jnp.int32), jnp.int32(p))) for p in range(6)]
        busiest = max(int(rows[rows[:, 0] >= 0, 3].sum()) for rows in work)
        assert busiest <= max(2, -(-blocks // 6))


def blocks_of_a_cluster(lengths, cluster, step=None):
    """The pair and block of all that the programs of a call take."""
    call = call_of(batch=len(lengths))
    work = ClusterWork(
        call._replace(config=dataclasses.replace(call.config, cluster=cluster)), jnp.asarray(lengths), None
    )
    taken = []
    for pair in range(len(lengths) * K):
        for rank in range(cluster):
            start = work.start(jnp.int32(pair), jnp.int32(rank))
            count = int(work.share_of(start))
            assert count <= work.most_blocks
            taken += [(pair, int(start.first + start.block) + i * (step or work.step)) for i in range(count)]
    return taken


def assert_shared_out(lengths, cluster, **how):
    taken = blocks_of_a_cluster(lengths, cluster, **how)
    assert len(set(taken)) == len(taken)
    rows = [max(1, -(-min(length, S) // KEYS)) for length in lengths]
    assert {(pair, i) for pair, i in taken if i < rows[pair // K]} == {
        (b * K + k, i) for b, n in enumerate(rows) for k in range(K) for i in range(n)
    }


@pytest.mark.parametrize("cluster", [2, 8])
def test_a_cluster_takes_every_block_once(cluster):
    assert_shared_out((700, 0, 65, 2000), cluster)
    with pytest.raises(AssertionError):
        assert_shared_out((700,), cluster, step=1)


def test_clusters_are_taken_where_all_run_at_once(monkeypatch):
    monkeypatch.setattr(config, "CLUSTERS", (16, 8))
    shape = config.DecodeShape(1, 5, 2048, 32, 8, 128)
    sizes = (
        ({}, 16),
        ({"B": 2}, 8),
        ({"B": 3}, 1),
        ({"S": 512}, 8),
        ({"S": 4096}, 16),
        ({"S": 4160}, 1),
        ({"H": 64}, 1),
    )
    for changed, size in sizes:
        changed_shape = dataclasses.replace(shape, **changed)
        chosen = config.heuristic(changed_shape, 132)
        assert chosen.cluster == config.cluster_size(changed_shape, 132) == size
        assert not config.config_refusals(changed_shape, chosen)
        assert config.heuristic(changed_shape, 132, pinned=True).cluster == 1
    assert config.heuristic(shape, 132).stages == 2  # a program has two blocks at most
    assert config.cluster_size(shape, 127) == 8


def test_eight_programs_are_a_cluster_by_default():
    shape = config.DecodeShape(1, 5, 2048, 32, 8, 128)
    chosen = config.heuristic(shape, 132)
    assert (chosen.cluster, chosen.block_keys, chosen.stages) == (8, 64, 4)
    assert config.heuristic(dataclasses.replace(shape, B=8), 132).cluster == 1


def test_the_tuner_may_try_clusters():
    sizes = {one.cluster for one in config.candidates(config.DecodeShape(1, 5, 2048, 32, 8, 128), 132)}
    assert sizes == {1, 2, 4, 8, 16}
    assert {one.cluster for one in config.candidates(config.DecodeShape(64, 5, 2048, 32, 8, 128), 132)} == {1}


@pytest.mark.parametrize(
    "wrong", [{"cluster": 17}, {"stages": 1}, {"stages": True}, {"programs": 0}, {"block_keys": 96}, {"merge_loads": 0}]
)
def test_illegal_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        config.DecodeConfig(**wrong)


@pytest.mark.parametrize(("T", "G"), [(1, 1), (1, 4), (8, 8), (16, 8), (16, 16), (5, 3), (9, 2)])
@pytest.mark.parametrize("H", config.HEAD_SIZES)
def test_settings_fit_the_chip(T, G, H):
    shape = config.DecodeShape(4, T, 4096, 2 * G, 2, H)
    assert shape.rows >= T * G
    assert shape.rows % 8 == 0
    settings = config.candidates(shape, 132)
    legal = not config.config_refusals(shape, config.heuristic(shape, 132))
    assert legal or (shape.tiles, H) == (4, 256)
    assert (config.heuristic(shape, 132) in settings[:1]) == legal
    assert len(set(settings)) == len(settings)
    assert not any(config.config_refusals(shape, one) for one in settings)
    too_many = config.DecodeConfig(stages=16)
    assert config.config_refusals(shape, too_many)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"H": 96}, "head sizes"),
        ({"T": 17}, "new tokens"),
        ({"S": 32}, "at least 64 slots"),
        ({"S": 1001}, "multiple of 8"),
        ({"N": 64, "T": 16, "K": 2}, "rows of tokens"),
        ({"page": 24}, "multiple of 16"),
    ],
)
def test_what_the_kernel_cannot_take(changed, reason):
    sizes = {"B": 2, "T": 2, "S": 1024, "N": 4, "K": 2, "H": 128, "page": None}
    assert not config.refusals(config.DecodeShape(**sizes), itemsize=2, value_size=128)
    wrong = config.DecodeShape(**sizes | changed)
    refused = config.refusals(wrong, itemsize=2, value_size=wrong.H)
    assert any(reason in text for text in refused)
    assert config.refusals(config.DecodeShape(**sizes), itemsize=4, value_size=64)[0].startswith(
        "takes elements of two"
    )
