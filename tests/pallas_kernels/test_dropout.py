"""The counter-based bits: known answers, uniform, independent across neighbours, and the same whatever tile asks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dropout
from pallas_kernels.launch import cdiv, round_up

WORDS = (jnp.uint32(0x13198A2E), jnp.uint32(0x03707344))
CHI2_15_QUANTILE = 56.5  # chi-square, 15 degrees of freedom, probability of exceeding 1e-6


def grid(q_start=0, q_size=256, k_start=0, k_size=256, batch=0, head=0, words=WORDS):
    of_head = dropout.head_words(words, batch, head)
    query = q_start + jnp.arange(q_size, dtype=jnp.int32)[:, None]
    key = k_start + jnp.arange(k_size, dtype=jnp.int32)[None, :]
    return of_head, query, key


def sixteen_cells(a, b):
    """Chi-square of 16 equally likely cells: the top two bits of a beside those of b."""
    cells = (np.asarray(a) >> 30) * 4 + (np.asarray(b) >> 30)
    counts = np.bincount(cells.ravel(), minlength=16)
    expected = cells.size / 16
    return ((counts - expected) ** 2 / expected).sum()


def neighbours(bits):
    return {
        "itself": (bits << 2, bits),
        "query": (bits[:-1], bits[1:]),
        "key": (bits[:, :-1], bits[:, 1:]),
        "diagonal": (bits[:-1, 1:], bits[1:, :-1]),
    }


def test_threefry_known_answers():
    """The vectors of the Random123 distribution, 20 rounds."""
    known = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, expected in known:
        words = [tuple(jnp.uint32(word) for word in pair) for pair in (key, counter)]
        assert tuple(int(word) for word in dropout.threefry2x32(*words, rounds=20)) == expected


@pytest.mark.parametrize("axis", ["itself", "query", "key", "diagonal"])
def test_bits_are_uniform_and_independent_of_neighbours(axis):
    assert sixteen_cells(*neighbours(np.asarray(dropout.bits(*grid())))[axis]) < CHI2_15_QUANTILE


def test_heads_and_rows_are_independent():
    first = dropout.bits(*grid())
    assert sixteen_cells(first, dropout.bits(*grid(head=1))) < CHI2_15_QUANTILE
    assert sixteen_cells(first, dropout.bits(*grid(batch=1))) < CHI2_15_QUANTILE
    assert sixteen_cells(dropout.bits(*grid(batch=1)), dropout.bits(*grid(head=1))) < CHI2_15_QUANTILE


def test_too_few_rounds_are_caught():
    """Wrong variant: four rounds leave neighbours related."""
    of_head, query, key = grid()
    counter = jnp.broadcast_arrays(query.astype(jnp.uint32), key.astype(jnp.uint32))
    weak = np.asarray(dropout.threefry2x32(of_head, tuple(counter), rounds=4)[0])
    assert max(sixteen_cells(*pair) for pair in neighbours(weak).values()) > CHI2_15_QUANTILE


def tiled(tile, use_global_indices=True):
    rows = []
    for q in range(0, 48, tile):
        starts = [(q, k) if use_global_indices else (0, 0) for k in range(0, 48, tile)]
        rows.append([dropout.keep_mask(*grid(a, tile, b, tile), 0.3) for a, b in starts])
    return np.block([[np.asarray(x) for x in row] for row in rows])


@pytest.mark.parametrize("tile", [1, 16, 24])
def test_tiles_draw_what_the_whole_draws(tile):
    whole = np.asarray(dropout.keep_mask(*grid(0, 48, 0, 48), 0.3))
    if tile == 1:
        np.testing.assert_array_equal(np.asarray(dropout.keep_mask(*grid(5, 1, 7, 1), 0.3)), whole[5:6, 7:8])
        return
    np.testing.assert_array_equal(tiled(tile), whole)
    with pytest.raises(AssertionError):  # wrong variant: indices within the tile
        np.testing.assert_array_equal(tiled(tile, use_global_indices=False), whole)


def test_coordinates_do_not_collide_as_a_product_would():
    """Beyond 2^31 products, query * S + key would wrap: (2^17, 0) and (0, 0) with S = 2^15 share it."""
    far = dropout.bits(*grid(q_start=2**17, k_start=0))
    assert not np.array_equal(far, dropout.bits(*grid()))
    assert sixteen_cells(far, dropout.bits(*grid())) < CHI2_15_QUANTILE


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.9])
def test_rate_is_the_fraction_dropped(rate):
    keep = np.asarray(dropout.keep_mask(*grid(q_size=512, k_size=512), rate))
    bound = 5 * np.sqrt(rate * (1 - rate) / keep.size)
    assert abs((1 - keep.mean()) - rate) < bound
    with pytest.raises(AssertionError):  # wrong variant: the polarity flipped, at a rate where it shows
        assert abs(keep.mean() - (0.4 if rate == 0.5 else rate)) < bound


def test_rates_zero_and_one_and_the_threshold():
    assert np.asarray(dropout.keep_mask(*grid(), 0.0)).all()
    assert not np.asarray(dropout.keep_mask(*grid(), 1.0)).any()
    assert dropout.threshold(0.5) == 2**31
    assert dropout.threshold(2**-32) == 1
    assert dropout.threshold(0.1) == round(0.1 * 2**32)


def test_key_words_of_every_key_type():
    for name, size in (("threefry2x32", 2), ("rbg", 4)):
        data = jax.random.key_data(jax.random.key(7, impl=name))
        assert data.shape == (size,)
        changed = data.at[size - 1].set(data[size - 1] ^ jnp.uint32(1))
        words = [tuple(int(word) for word in dropout.key_words(x)) for x in (data, changed)]
        assert words[0] != words[1]


def test_wide_indices_and_jit_agree(x64):
    of_head, query, key = grid()
    narrow = np.asarray(dropout.keep_mask(of_head, query, key, 0.25))
    wide = jax.jit(lambda q, k: dropout.keep_mask(of_head, q, k, 0.25))(query.astype(jnp.int64), key.astype(jnp.int64))
    np.testing.assert_array_equal(narrow, np.asarray(wide))


def test_launch_arithmetic():
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up(a, 4) for a in (0, 1, 4, 5)] == [0, 4, 4, 8]
