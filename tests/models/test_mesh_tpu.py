"""Generation on a mesh compiles for a slice of TPU v5e, ahead of time and without one.

python -m pip install 'jax[tpu]' && python -m pytest -m slow tests/models/test_mesh_tpu.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flashspec import models, selection
from flashspec.attention import decode
from flashspec.generate import generate
from flashspec.models.partition import parameter_spec, sharding
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter

pytestmark = pytest.mark.slow

TARGET = models.DecoderConfig("qwen3", 2048, 512, 1024, 2, 16, 8, 128)
DRAFT = models.DecoderConfig("llama", 2048, 256, 512, 1, 8, 4, 64, tie_embeddings=True)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> jax.sharding.Mesh:
    """A v5e slice of 4 x 4 chips, as the compiler knows it."""
    pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install 'jax[tpu]'")
    from jax.experimental import topologies

    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-16"),
    ):
        monkeypatch.setenv(name, value)
    # What a process with these chips would find.
    monkeypatch.setattr(decode, "resolve_device", lambda *_: selection.Target("TPU v5 lite", "tpu"))
    monkeypatch.setattr(selection, "targets", tuple)
    slice_of_16 = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
    return models.decoder_mesh(4, 4, slice_of_16.devices)


def shapes(config: models.DecoderConfig, mesh: jax.sharding.Mesh) -> Any:
    """Parameters as shapes, split over the mesh."""
    abstract = nnx.state(nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    flat = [
        (
            path,
            leaf.replace(
                jax.ShapeDtypeStruct(
                    leaf.shape, jnp.bfloat16, sharding=sharding(mesh, parameter_spec(config, mesh, path))
                )
            ),
        )
        for path, leaf in nnx.to_flat_state(abstract)
    ]
    return nnx.from_flat_state(flat)


@pytest.mark.parametrize("speculative", [False, True])
def test_it_compiles_for_a_slice(mesh: jax.sharding.Mesh, speculative: bool) -> None:
    target, draft = (models.as_language_model(config, jnp.bfloat16, mesh=mesh) for config in (TARGET, DRAFT))

    def decode(key: jax.Array, params: Any, draft_params: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return generate(
            key,
            target,
            params,
            tokens,
            lengths,
            drafter=ModelDrafter(draft, draft_params) if speculative else None,
            sampling=SamplingParams(temperature=0.8, top_k=None, top_p=None),
            max_new_tokens=64,
        ).tokens

    rows = sharding(mesh, ("data",))
    arguments = (
        jax.eval_shape(lambda: jax.random.key(0)),
        shapes(TARGET, mesh),
        shapes(DRAFT, mesh),
        jax.ShapeDtypeStruct((8, 128), jnp.int32, sharding=rows),
        jax.ShapeDtypeStruct((8,), jnp.int32, sharding=rows),
    )
    compiled = jax.jit(decode).lower(*arguments).compile()
    program = compiled.as_text() or ""
    assert "all-reduce" in program  # the two sums of a layer
    assert "flashspec_attention_forward" in program  # of the prompt
    assert "flashspec_attention_decode" in program
    # A device holds a quarter of the target, not all of it: 2 bytes a parameter, with what the programs need besides.
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes < 2 * (TARGET.num_parameters + DRAFT.num_parameters) / 4 * 1.2
