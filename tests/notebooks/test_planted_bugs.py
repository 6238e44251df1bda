"""The notebooks' assertions can fail: each notebook runs here on a library with one bug, and objects."""

import importlib.util

import pytest

if any(importlib.util.find_spec(package) is None for package in ("jupytext", "nbclient", "ipykernel", "ipywidgets")):
    pytest.skip("needs the packages of the dev group", allow_module_level=True)

import nbclient
import nbformat

from notebooks import build

REDRAW_FROM_THE_TARGET = """
from flashspec.speculative import accept, formulas
accept.residual_weights = formulas.residual_weights = lambda p, q: p
"""

# What runs before the first cell.
BUGS = {
    "33_1_costs": """
from flashspec import costs
costs.amdahl_speedup = lambda fraction, speedup, overhead=0: 1 + fraction * (speedup - 1)
""",
    "33_2_softmax_statistics": """
import flashspec
import jax
flashspec.merge = lambda a, b: jax.tree.map(lambda x, y: x + y if x.ndim else jax.numpy.maximum(x, y), a, b)
""",
    "33_3_flash_attention": """
import flashspec
right_stats = flashspec.attention_stats
flashspec.attention_stats = lambda *operands, **options: right_stats(*operands)
""",
    "33_4_fusion_and_shapes": """
from flashspec import costs
costs.break_even_calls = lambda compile_time, before, after: compile_time / (before - after)
""",
    "33_5_speculative_sampling": REDRAW_FROM_THE_TARGET,
    "33_6_verification_and_caches": """
from flashspec import LanguageModel
right_fill = LanguageModel.fill
LanguageModel.fill = lambda self, params, tokens, num_valid, capacity: right_fill(
    self, params, tokens, num_valid - 1, capacity
)
""",
    "33_7_gain_and_bounds": """
from flashspec import costs
costs.expected_tokens = lambda acceptance, length=None, **_: sum(costs.survival(acceptance, length)[1:])
""",
    "33_exercises": REDRAW_FROM_THE_TARGET,
}


SHORT = ("33_2_softmax_statistics", "33_5_speculative_sampling")  # the others take the default run too long


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in build.NAMES]
)
def test_a_bug_in_the_library_fails_an_assertion(name: str) -> None:
    notebook = build.source_of(name)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BUGS[name]))
    with pytest.raises(nbclient.exceptions.CellExecutionError) as raised:
        build.execute(notebook)
    assert raised.value.ename == "AssertionError"
