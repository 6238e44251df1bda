"""The least time of a forward of decoding: the bytes that it reads, at the speed at which memory can be read."""

import jax.numpy as jnp

from flashspec import models
from flashspec.measure import compile_call, time_call

LEAST_READ_RATE = 4.3e12  # of an H200; a slower reduction would lower the bound


def step_bytes(config: models.DecoderConfig, batch: int, positions: int) -> int:
    """What a forward in 16 bits reads at least: all weights but untied embeddings, and every row's keys and values."""
    size = config.num_parameters - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    return 2 * (size + batch * positions * 2 * config.num_layers * config.num_kv_heads * config.head_dim)


def read_rate(smoke: bool) -> float:
    """Bytes a second of a reduction over 2 GiB, taken as no less than `LEAST_READ_RATE` but in a smoke run."""
    data = jnp.ones(2**20 if smoke else 2**29, jnp.float32)
    rate = data.nbytes / time_call(compile_call(jnp.sum, data), repeats=5).steady_s
    return rate if smoke else max(rate, LEAST_READ_RATE)
