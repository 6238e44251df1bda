"""A checkpoint passes through the host one parameter at a time: anonymous memory, measured while it is read."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.host_memory import AnonymousPeak, anonymous_bytes
from flashspec import models
from flashspec.models import tensor_files
from flashspec.models.parameter_layout import slots

# 4 MB a layer in bfloat16, 2 MB in the largest parameter, 98 MB in all.
CONFIG = models.DecoderConfig("llama", 64, 512, 1024, 24, 8, 4, 64)
LARGEST = 2 * 2 * 512 * 1024
ALL = 2 * CONFIG.num_parameters
SLACK = 16_000_000  # programs and the allocator

pytestmark = pytest.mark.skipif(not anonymous_bytes(), reason="the system does not tell anonymous memory")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ones, read once so that what loading compiles is there."""
    folder = tmp_path_factory.mktemp("streaming")
    entries = {name: (shape, np.dtype(jnp.bfloat16)) for slot in slots(CONFIG) for name, shape in slot.shapes.items()}
    tensor_files.write(folder, entries, (np.ones(*entry) for entry in entries.values()), 10**9)
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf("bfloat16")))
    models.load(folder, jnp.bfloat16)
    return folder


def assert_streams(directory: Path) -> None:
    """Beyond the parameters, which a CPU holds there too: two on their way, each as stored, joined and turned."""
    with AnonymousPeak() as memory:
        checkpoint = models.load(directory, jnp.bfloat16)
    assert float(checkpoint.params["norm"]["scale"][0]) == 1
    assert memory.growth - ALL < 6 * LARGEST + SLACK


def test_anonymous_memory_is_bounded(directory: Path) -> None:
    assert_streams(directory)


def test_a_loader_that_reads_everything_first_is_seen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, read = [], tensor_files.StoredTensor.read

    def hoarding(tensor: tensor_files.StoredTensor) -> np.ndarray:
        kept.append(read(tensor).copy())
        return kept[-1]

    monkeypatch.setattr(tensor_files.StoredTensor, "read", hoarding)
    with pytest.raises(AssertionError):
        assert_streams(directory)
