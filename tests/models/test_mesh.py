"""Generation on meshes of virtual devices, judged against one device; what lies where; what does not fit."""

import collections
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from flashspec import models
from flashspec.generate import Generation, generate
from flashspec.models.checkpoint import _joiner, _turner
from flashspec.models.parameter_layout import slots
from flashspec.models.partition import parameter_spec, sharding
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter
from tests.models.examples import assert_close, example, forward, random_params

SIZES = (48, 32, 64, 2, 16, 8, 4)
CONFIG = models.DecoderConfig("qwen2", *SIZES, sliding_window=6, full_layers=(0,))
DRAFT = models.DecoderConfig("llama", 48, 16, 16, 1, 8, 8, 4, tie_embeddings=True)
MESHES = [(1, 8), (2, 4)]
PROMPTS = np.random.default_rng(0).integers(0, 48, (2, 5)).astype(np.int32)
LENGTHS = np.array([5, 3], np.int32)
ROUNDING = 256 * float(np.finfo(np.float32).eps)
parameters = functools.cache(random_params)


def decode(mesh: Any, *, speculative: bool, damage: bool = False) -> Generation:
    """Greedy decoding of `PROMPTS` on a mesh."""
    target, draft = (models.place(config, parameters(config), mesh) for config in (CONFIG, DRAFT))
    if damage:
        target["layers"][0]["out"][...] = jnp.roll(target["layers"][0]["out"][...], 4, axis=0)
    drafter = ModelDrafter(models.as_language_model(DRAFT, mesh=mesh), draft)
    return generate(
        jax.random.key(0),
        models.as_language_model(CONFIG, mesh=mesh),
        target,
        PROMPTS,
        LENGTHS,
        drafter=drafter if speculative else None,
        draft_length=3,
        sampling=SamplingParams(temperature=0.0, top_k=None, top_p=None),
        max_new_tokens=12,
    )


def assert_greedy(generation: Generation) -> None:
    """Each new token's own logit is within rounding of its row's maximum, by one device's forward over whole rows."""
    tokens = np.asarray(generation.tokens)
    logits = np.asarray(forward(CONFIG, parameters(CONFIG), jnp.asarray(tokens)))
    for row, (start, stop) in enumerate(zip(LENGTHS, np.asarray(generation.lengths), strict=True)):
        before = logits[row, start - 1 : stop - 1]
        own = np.take_along_axis(before, tokens[row, start:stop, None], axis=1)[:, 0]
        np.testing.assert_allclose(own, before.max(1), rtol=0, atol=ROUNDING * np.abs(before).max())


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("shape", MESHES)
def test_greedy_tokens_are_the_maxima_of_one_device(shape: tuple[int, int], speculative: bool) -> None:
    generation = decode(models.decoder_mesh(*shape), speculative=speculative)
    assert np.asarray(generation.lengths - LENGTHS).tolist() == [12, 12]
    assert_greedy(generation)
    keys = generation.state.target_cache.key[0]
    assert keys.sharding.shard_shape(keys.shape) == (2 // shape[0], keys.shape[1], 8 // shape[1], 4)


def test_heads_in_another_order_are_seen() -> None:
    with pytest.raises(AssertionError):
        assert_greedy(decode(models.decoder_mesh(1, 8), speculative=False, damage=True))


@pytest.mark.parametrize("config", [CONFIG, DRAFT, dataclasses.replace(CONFIG, vocab_size=45)])
def test_loading_onto_a_mesh(config: models.DecoderConfig, tmp_path: Path) -> None:
    params, mesh = parameters(config), models.decoder_mesh(2, 4)
    models.save(tmp_path, config, params, max_shard_bytes=9000)
    loaded, placed = models.load(tmp_path, mesh=mesh).params, models.place(config, params, mesh)
    for (path, held), (_, wanted), (_, own) in zip(
        *(nnx.to_flat_state(tree) for tree in (loaded, placed, params)), strict=True
    ):
        assert held[...].sharding.is_equivalent_to(wanted[...].sharding, held[...].ndim), path
        np.testing.assert_array_equal(np.asarray(held[...]), np.asarray(own[...]))
    assert loaded["layers"][0]["qkv"][...].sharding.spec == P(None, "model")
    assert loaded["layers"][0]["gate_up"][...].sharding.spec == P(None, None, "model")
    assert loaded["layers"][0]["down"][...].sharding.spec == P("model", None)
    assert loaded["head"][...].sharding.spec == P(None, None if config.vocab_size == 45 else "model")
    models.save(tmp_path / "again", config, loaded)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, models.load(tmp_path / "again").params, params))


def test_joining_moves_nothing_between_devices() -> None:
    """The compiled program that makes a split parameter of split tensors has no collective."""
    mesh = models.decoder_mesh(2, 4)
    for slot in slots(CONFIG):
        spec = parameter_spec(CONFIG, mesh, slot.path)
        between = (*spec[1:], spec[0]) if slot.layout.turns else spec
        stored = sharding(mesh, slot.layout.stored_spec(between))
        parts = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=stored) for shape in slot.shapes.values()]
        join = _joiner(slot.layout, np.dtype(np.float32), sharding(mesh, between)).lower(parts)
        joined = jax.ShapeDtypeStruct(join.out_info.shape, jnp.float32, sharding=sharding(mesh, between))
        turn = _turner(sharding(mesh, spec)).lower(joined) if slot.layout.turns else join
        for program in (join.compile().as_text(), turn.compile().as_text()):
            assert not any(name in program for name in ("all-to-all", "all-gather", "collective-permute")), slot.path


COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives(shape: tuple[int, int]) -> collections.Counter[str]:
    """What one forward sends between devices."""
    mesh = models.decoder_mesh(*shape)
    model = models.as_language_model(CONFIG, mesh=mesh)
    params = models.place(CONFIG, parameters(CONFIG), mesh)

    def forward(params: Any, tokens: jax.Array) -> Any:
        return model.apply(params, tokens, model.init_cache(2, 16))

    program = jax.jit(forward).lower(params, jnp.ones((2, 3), jnp.int32)).compile().as_text()
    return collections.Counter(COLLECTIVE.findall(program))


@pytest.mark.parametrize("shape", MESHES)
def test_a_forward_sends_two_sums_a_layer(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides, embeddings and logits are gathered once; no weight and no cache ever moves."""
    assert collectives(shape) == {"all-reduce": 2 * CONFIG.num_layers, "all-gather": 2}
    monkeypatch.setattr(models.language_model, "split_rows", lambda x, mesh: x)
    assert collectives(shape).total() > 2 * CONFIG.num_layers + 2


@pytest.mark.parametrize("kind", ["window", "paged"])
def test_other_caches(kind: str) -> None:
    config = dataclasses.replace(CONFIG, full_layers=(), num_layers=1)
    params, tokens = parameters(config), jnp.asarray(np.random.default_rng(1).integers(0, 48, (2, 9)), jnp.int32)
    mesh = models.decoder_mesh(2, 4)
    model = models.as_language_model(config, mesh=mesh, cache=kind, draft_length=2, page_size=4)

    @jax.jit
    def decode(params: Any, tokens: jax.Array) -> jax.Array:
        cache = model.fill(params, tokens[:, :6], jnp.array([6, 4], jnp.int32), 12)
        following = jnp.take_along_axis(tokens, cache.length[:, None] + jnp.arange(3, dtype=jnp.int32)[None], axis=1)
        return model.apply(params, following, cache)[0]

    wanted = forward(config, params, tokens)
    assert_close(decode(models.place(config, params, mesh), tokens), jnp.stack([wanted[0, 6:], wanted[1, 4:7]]))


def test_what_a_mesh_does_not_divide_is_named(tmp_path: Path) -> None:
    config, params = example("llama")  # two key/value heads
    mesh = models.decoder_mesh(1, 8)
    for call in (
        lambda: models.as_language_model(config, mesh=mesh),
        lambda: models.place(config, params, mesh),
    ):
        with pytest.raises(ValueError, match=r"`mesh`: expected an axis 'model' that divides num_kv_heads = 2, got 8"):
            call()
    with pytest.raises(ValueError, match=r"`mesh`: expected a jax\.sharding\.Mesh with the axes 'data' and 'model'"):
        models.as_language_model(config, mesh=jax.make_mesh((8,), ("x",)))
    with pytest.raises(ValueError, match=r"`batch`: expected rows that the mesh's axis 'data' of 2 devices divides"):
        models.as_language_model(CONFIG, mesh=models.decoder_mesh(2, 4)).init_cache(3, 8)
    with pytest.raises(ValueError, match="`devices`: expected 16"):
        models.decoder_mesh(4, 4)
