"""Memory of blockwise attention, read from the compiled programs: nothing runs, so 8192 x 8192 costs no memory here."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.harness import Job
from flashspec.attention import dot_product_attention

QUESTION = "Does blockwise attention, forward or backward, ever hold a T x S matrix?"
NEEDS = "a CPU"
TIME = "30 s on a CPU"

LENGTHS = (1024, 2048, 4096, 8192)
SMOKE_LENGTHS = (512, 1024, 2048)
HEADS = (1, 32)
HEAD_SIZE = 128
ITEM = 2  # bytes of a bfloat16
MIB = 2**20

type Sizes = dict[tuple[str, str], list[int]]  # (direction, implementation) -> bytes, one for each length


def forward(query: jax.Array, key: jax.Array, value: jax.Array, implementation: str) -> jax.Array:
    """Causal attention."""
    return dot_product_attention(query, key, value, is_causal=True, implementation=implementation)


def backward(query: jax.Array, key: jax.Array, value: jax.Array, implementation: str) -> tuple[jax.Array, ...]:
    """Gradients of all three operands; squaring makes the cotangent depend on the output."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(forward(query, key, value, implementation)))

    return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)


PROGRAMS: dict[str, Callable[..., object]] = {"forward": forward, "backward": backward}
IMPLEMENTATIONS = ("reference", "blockwise")


def temporary_bytes(direction: str, implementation: str, heads: int, length: int) -> int:
    """Bytes that the compiled program needs besides its arguments and results, at T = S = `length`."""
    operand = jax.ShapeDtypeStruct((1, length, heads, HEAD_SIZE), jnp.bfloat16)
    program = jax.jit(functools.partial(PROGRAMS[direction], implementation=implementation))
    memory = program.lower(operand, operand, operand).compile().memory_analysis()
    if memory is None:
        raise NotImplementedError(f"{jax.default_backend()} does not say how much memory a compiled program needs")
    return int(memory.temp_size_in_bytes)


def run(job: Job) -> None:
    """Compare the temporary memory of `reference` and `blockwise` as T = S doubles."""
    lengths = SMOKE_LENGTHS if job.smoke else LENGTHS
    for heads in HEADS:
        pairs = list(itertools.product(PROGRAMS, IMPLEMENTATIONS))
        tracked = job.track(pairs, f"compiling, N = {heads}")
        sizes: Sizes = {pair: [temporary_bytes(*pair, heads, length) for length in lengths] for pair in tracked}
        for (direction, implementation), row in sizes.items():
            settings = {"implementation": implementation, "N": heads, "H": HEAD_SIZE, "dtype": "bfloat16"}
            for length, size in zip(lengths, row, strict=True):
                values = {"temporary_bytes": size, "matrix_bytes": matrix_bytes(heads, length)}
                job.record(direction, settings=settings | {"T": length, "S": length}, values=values)
        show(job, heads, sizes, lengths)
        for direction in PROGRAMS:
            judge(job, heads, direction, sizes, lengths)
    matrix, largest = matrix_bytes(heads, lengths[-1]), max(sizes[d, "blockwise"][-1] for d in PROGRAMS)
    job.reaches(
        "blockwise attention",
        f"{heads} heads, T = S = {lengths[-1]}: forward and backward need {largest / MIB:.3g} MiB at most where the "
        f"T x S matrices take {matrix / MIB:.0f}",
    )


def matrix_bytes(heads: int, length: int) -> int:
    """One T x S matrix for each head."""
    return heads * ITEM * length**2


def show(job: Job, heads: int, sizes: Sizes, lengths: tuple[int, ...]) -> None:
    """The table and the plot."""
    title = f"Temporary memory, {heads} head{'s' if heads > 1 else ''} of size {HEAD_SIZE}, bfloat16"
    matrices = [matrix_bytes(heads, length) for length in lengths]
    columns = ["T = S", "T x S matrices, MiB", *(f"{i}, {d}, MiB" for d, i in sizes)]
    rows = zip(lengths, *([size / MIB for size in row] for row in (matrices, *sizes.values())), strict=True)
    job.table(f"heads{heads}", title, columns, list(rows))
    with job.figure(f"heads{heads}", title) as axes:
        for direction, implementation in sizes:
            style = {"forward": "-o", "backward": "--s"}[direction]
            colour = {"reference": "tab:red", "blockwise": "tab:blue"}[implementation]
            values = [size / MIB for size in sizes[direction, implementation]]
            axes.plot(lengths, values, style, color=colour, label=f"{implementation}, {direction}")
        axes.plot(lengths, [matrix / MIB for matrix in matrices], ":", color="black", label="T x S matrices")
        axes.set(xscale="log", yscale="log", xlabel="T = S", ylabel="MiB")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.legend()


def judge(job: Job, heads: int, direction: str, sizes: Sizes, lengths: tuple[int, ...]) -> None:
    """Below one matrix, and growing with T + S; the reference grows with T S, or the measure would be blind."""
    size, matrix = sizes[direction, "blockwise"][-1], matrix_bytes(heads, lengths[-1])
    growth, control = (sizes[direction, i][-1] / sizes[direction, i][-2] for i in ("blockwise", "reference"))
    job.claim(
        f"{direction}, N = {heads}: at T = S = {lengths[-1]} blockwise needs less than the T x S matrices "
        f"({size / MIB:.3g} of {matrix / MIB:.0f} MiB)",
        size < matrix,
    )
    job.claim(
        f"{direction}, N = {heads}: from {lengths[-2]} to {lengths[-1]} blockwise grows {growth:.3g} times "
        f"(2 is linear); the reference, as a control, {control:.3g} times (4 is quadratic)",
        growth < 2.2 and control > 3.5,
    )
