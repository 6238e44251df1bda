"""Kernels compiled for an H200 where there is none, down to machine code: registers, spills, shared memory.

    python -m tests.pallas_kernels.hopper.sass "forward 128 causal" ...

compiles variants by name (without one, all) in this process and prints a line of JSON for each kernel of each. What it
needs is the extra `aot`: jax's CUDA plugin, ptxas and nvdisasm. `reports` runs it in a process of its own, since XLA
reads from the environment, once, where to leave what ptxas said.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("h200.txtpb")
ROOT = Path(__file__).parents[3]
NEEDED = "jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc and nvidia-cuda-nvdisasm (the extra `aot`)"
SHARED_MEMORY = 227 * 1024  # bytes that a thread block may have
TIMEOUT = 900


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler said of one kernel.

    Attributes:
      variant: that it belongs to.
      kernel: its name.
      registers: of a thread, on average over the warpgroups of a block.
      spilled: bytes that are stored because there is no register for them.
      serialized: whether matrix products wait for each other, which the compiler does where it cannot follow them.
      shared_bytes: of a thread block.
      products: matrix instructions (HGMMA or HMMA).
      relaxed: as `relaxed_arrivals` counts them.
      ahead: as `exponentials_ahead` counts them.
    """

    variant: str
    kernel: str
    registers: int
    spilled: int
    serialized: bool
    shared_bytes: int
    products: int
    relaxed: int = 0
    ahead: int = 0


def missing() -> str:
    """Why nothing can be compiled here; empty when it can."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return f"needs {NEEDED}: there is no jax_cuda13_plugin"
    absent = [tool for tool in ("ptxas", "nvdisasm") if _tool(tool) is None]
    return f"needs {NEEDED}: there is no {', '.join(absent)}" if absent else ""


def _tool(name: str) -> str | None:
    """Where a program of the CUDA toolkit lies: in the environment's packages, or on PATH."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = (str(path) for folder in folders for path in folder.glob(f"*/bin/{name}"))
    return next(found, None) or shutil.which(name)


def reports(names: Iterable[str], module: str = "tests.pallas_kernels.hopper.sass") -> dict[str, list[Report]]:
    """Compile variants, of a module like this one, in a process of their own; the kernels of each by its name."""
    command = [sys.executable, "-m", module, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    found: dict[str, list[Report]] = {}
    for line in done.stdout.splitlines():
        report = Report(**json.loads(line))
        found.setdefault(report.variant, []).append(report)
    return found


def complaints(report: Report, spilled: int = 0) -> list[str]:
    """What is wrong with a kernel that may spill so many bytes."""
    rules = (
        (report.spilled > spilled, f"spills {report.spilled} bytes, of which {spilled} are known"),
        (report.serialized, "its matrix products wait for each other"),
        (report.shared_bytes > SHARED_MEMORY, f"takes {report.shared_bytes} bytes of shared memory"),
        (report.relaxed > 0, "programs of a cluster may leave while others still read their memory"),
    )
    return [f"{report.variant}, {report.kernel}: {text}" for broken, text in rules if broken]


def relaxed_arrivals(code: str) -> int:
    """How many arrivals at a cluster's barrier do not wait for reads that are under way.

    The first one of a kernel comes before all reads and is not counted.
    """
    lines = [line for line in code.splitlines() if "/*" in line]
    _, *arrivals = [i for i, line in enumerate(lines) if "UCGABAR_ARV" in line] or [0]
    return sum(not any("MEMBAR" in line for line in lines[max(0, i - 6) : i]) for i in arrivals)


def exponentials_ahead(code: str) -> int:
    """How many exponentials stand between a wait for all products but one and that for the last, where fewest do."""
    counts, count = [], None
    for line in code.splitlines():
        if "DEPBAR.LE gsb0, 0x1" in line:
            count = 0
        elif count is not None and "DEPBAR.LE gsb0, 0x0" in line:
            counts.append(count)
            count = None
        elif count is not None:
            count += "MUFU.EX2" in line
    return min(counts, default=0)


# What is compiled. Each variant makes a function and the shapes of its arguments, from (shape, dtype) -> an argument.

type Make = Callable[..., Any]
type Variant = Callable[[Make], tuple[Callable[..., Any], tuple[Any, ...]]]

T, N = 2048, 8
MASKS = ("full", "causal", "window", "segments")


def _mask(kind: str) -> Any:
    from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, Bounds

    bounds = {"window": Bounds(-1023, 0, T, T)}.get(kind, Bounds(0, 0, T, T))
    return AttentionMask(kind == "window", kind in ("causal", "window"), kind == "segments", bounds)


def _segments(kind: str, make: Make) -> tuple[Any, ...]:
    import jax.numpy as jnp

    return tuple(make((2, T), jnp.int32) for _ in range(2 * (kind == "segments")))


def _forward(H: int, kind: str, make: Make, config: Any = None, settings: Any = None, **options: Any) -> Any:
    """A call with the heuristic's settings, some of them changed, or with a whole config."""
    import jax.numpy as jnp

    from pallas_kernels.gpu.hopper.attention_forward import attention_forward
    from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape, heuristic
    from pallas_kernels.gpu.hopper.attention_mask import SegmentIds

    chosen = config or heuristic(AttentionShape(2, T, T, N, N, H, H), options.get("statistics", False))
    chosen = dataclasses.replace(chosen, **(settings or {}))

    def call(query: Any, key: Any, value: Any, *ids: Any) -> Any:
        segments = SegmentIds(*ids) if ids else None
        return attention_forward(
            query, key, value, None, segments, mask=_mask(kind), scale=0.1, config=chosen, **options
        )

    x = make((2, T, N, H), jnp.bfloat16)
    return call, (x, x, x, *_segments(kind, make))


def _wide_tiles(make: Make) -> Any:
    """Blocks of 256 keys: the scores of a step alone fill the registers."""
    from pallas_kernels.gpu.hopper.attention_forward_config import ForwardConfig

    return _forward(128, "full", make, ForwardConfig(block_kv=256, stages=1))


def _backward(H: int, kind: str, deterministic: bool, make: Make) -> Any:
    import jax.numpy as jnp

    from pallas_kernels.gpu.hopper.attention_backward import attention_backward
    from pallas_kernels.gpu.hopper.attention_backward_config import BackwardShape, heuristic
    from pallas_kernels.gpu.hopper.attention_mask import SegmentIds

    config = heuristic(BackwardShape(2, T, T, N, N, H, H))

    def call(*arrays: Any) -> Any:
        operands, ids = arrays[:6], arrays[6:]
        segments = SegmentIds(*ids) if ids else None
        options = {"mask": _mask(kind), "scale": 0.1, "deterministic": deterministic, "config": config}
        return attention_backward(*operands, None, segments, **options)

    x, row = make((2, T, N, H), jnp.bfloat16), make((2, N, T), jnp.float32)
    return call, (x, x, x, x, row, row, *_segments(kind, make))


def _delta(make: Make) -> Any:
    import jax.numpy as jnp

    from pallas_kernels.gpu.hopper.attention_backward_delta import delta_and_zeros

    x = make((2, T, N, 128), jnp.bfloat16)
    return functools.partial(delta_and_zeros, head_size=128), (x, x)


def _decode(tokens: int, heads: tuple[int, int], H: int, kind: str, make: Make, **settings: int) -> Any:
    """A call with the heuristic's settings, or with other ones."""
    import jax.numpy as jnp

    from pallas_kernels.gpu.hopper.attention_decode import decode
    from pallas_kernels.gpu.hopper.attention_decode_config import (
        DecodeCall,
        DecodeConfig,
        DecodeOperands,
        DecodeShape,
        heuristic,
    )

    B, S, (heads_q, heads_kv), page = 4, 2048, heads, 64
    shape = DecodeShape(B, tokens, S, heads_q, heads_kv, H, page if kind == "pages" else None)
    config = DecodeConfig(**settings) if settings else heuristic(shape, 132, pinned=True)
    call = DecodeCall(shape, config, 0.1, left=1000 if kind == "ring" else None, is_ring=kind == "ring")
    size = (B * S // page, page, heads_kv, H) if kind == "pages" else (B, S, heads_kv, H)
    arrays = {
        "query": make((B, tokens, heads_q, H), jnp.bfloat16),
        "key": make(size, jnp.bfloat16),
        "value": make(size, jnp.bfloat16),
        "length": make((B,), jnp.int32),
    }
    arrays |= {"page_table": make((B, S // page), jnp.int32)} if kind == "pages" else {}
    arrays |= {"positions": make((B, S), jnp.int32)} if kind == "ring" else {}
    names = tuple(arrays)
    return lambda *x: decode(call, DecodeOperands(**dict(zip(names, x, strict=True)))), tuple(arrays.values())


def _matmul(rows: int, tail: str, make: Make) -> Any:
    import jax.numpy as jnp

    from pallas_kernels.gpu.hopper.matmul_epilogue import matmul_epilogue
    from pallas_kernels.gpu.hopper.matmul_epilogue_config import FewRowsConfig, MatmulShape, heuristic
    from pallas_kernels.gpu.hopper.matmul_epilogue_rows import matmul_epilogue_rows

    inputs, outputs = 4096, 14336
    gated, residual = tail == "gated", 4 if tail == "residual" else 0
    shape = MatmulShape(rows, outputs, inputs, 2 if gated else 1, residual)
    arrays = {"x": make((rows, inputs), jnp.bfloat16), "w": make((inputs, outputs), jnp.bfloat16)}
    arrays |= {"gate": arrays["w"]} if gated else {"bias": make((outputs,), jnp.bfloat16)}
    arrays |= {"residual": make((rows, outputs), jnp.float32)} if residual else {}
    options: dict[str, Any] = {"activation": "silu" if gated else "gelu_tanh"}
    options["config"] = heuristic(shape)
    kernel = matmul_epilogue_rows if isinstance(options["config"], FewRowsConfig) else matmul_epilogue
    return functools.partial(_named, kernel, tuple(arrays), options), tuple(arrays.values())


def _decode_block(
    rows: int,
    phases: tuple[str, ...],
    make: Make,
    *,
    options: bool = False,
    tokens: int | None = None,
    H: int = 128,
    layers: int = 1,
) -> Any:
    """A call with some phases; with attention, and of some layers, where the tokens of a batch row are given."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.gpu.hopper import decode_block_config as block
    from pallas_kernels.gpu.hopper.decode_block import decode_block
    from pallas_kernels.gpu.hopper.decode_block_letters_config import letters_of

    heads, slots, C = block.Heads(8, 4, H), 2048, 4096
    shape = block.BlockShape(rows, C, 14336, heads)
    how: dict[str, Any] = {"biased": options, "head_norms": options, "unit_offset": options, "layers": layers}
    if tokens is not None:
        how["attention"] = block.AttentionForm(tokens, slots, H**-0.5)
    config = block.heuristic(shape, 132, tokens is not None)
    plan = block.BlockPlan(shape, config, phases, 1e-5, activation=jax.nn.silu, **how)

    def each(name: str) -> tuple[Any, ...]:
        return (make(shape.matrix(name), jnp.bfloat16),) * layers if name in block.PRODUCTS else ()

    alone, whole = tokens is None, 32 if tokens is not None else 1  # whether attention is elsewhere; layers of a step
    followed = [name for name in block.ADDING if name in phases and not (alone and name == phases[-1])]
    cache = (make((max(2, rows // (tokens or rows)), slots, heads.K, H), jnp.bfloat16),) * 2
    given = block.BlockOperands(
        x=make((rows, shape.matrix(phases[0])[0]), jnp.bfloat16) if alone else None,
        weights=tuple(map(each, phases)),
        residual=make((plan.row_groups * block.TOGETHER, C), jnp.bfloat16) if alone else None,
        scales={name: make((whole, C), jnp.bfloat16) for name in followed},
        places=block.Places(*[make((rows,), jnp.int32)] * 2, *[make((rows, H // 2), jnp.float32)] * 2),
        bias=make((whole, heads.K * (heads.G + 2) * H), jnp.bfloat16) if options else None,
        head_scales=(make((whole, H), jnp.bfloat16),) * 2 if options else (),
        lengths=None if alone else make((2, rows // tokens), jnp.int32),
        first=None if alone else make((1,), jnp.int32),
    )
    held = (
        None if alone else jax.tree.map(lambda x: make(x.shape, x.dtype), block.beginning(plan, jnp.bfloat16)),
        (cache,) * layers if "qkv" in phases else (),
        make(block.COUNTS, jnp.int32),
        make((letters_of(plan).total, 2), jnp.int32),
    )

    def call(given: Any, held: Any) -> Any:
        begin, caches, counts, letters = refs = jax.tree.map(jax.new_ref, held)
        out = decode_block(plan, given._replace(begin=begin, caches=caches, counts=counts, letters=letters))
        return out.residual, out.query, *map(jax.freeze, jax.tree.leaves(refs))

    return call, (given, held)


BETWEEN = ("out", "gate_up", "down", "qkv")
LAYER = ("qkv", "attend", "merge", "out", "gate_up", "down")


def _named(function: Callable[..., Any], names: tuple[str, ...], options: dict[str, Any], *arrays: Any) -> Any:
    return function(**dict(zip(names, arrays, strict=True)), **options)


PLAIN = {"query_buffers": 1, "early_turn": 0, "lazy_sum": False}
EARLY = {"early_turn": 2, "lazy_sum": True}
PLANTED = "planted: tiles that are too large"
VARIANTS: dict[str, Variant] = {
    **{f"forward {H} {kind}": functools.partial(_forward, H, kind) for H in (64, 128, 256) for kind in MASKS},
    "forward 128 statistics": functools.partial(_forward, 128, "causal", statistics=True),
    "forward 128 soft cap": functools.partial(_forward, 128, "causal", soft_cap=30.0),
    **{f"forward 128 {kind}, plain": functools.partial(_forward, 128, kind, settings=PLAIN) for kind in MASKS[:2]},
    **{
        f"forward {H} {kind}, early turn": functools.partial(
            _forward, H, kind, settings=EARLY if H == 256 else EARLY | {"query_buffers": 2}
        )
        for H in (64, 128, 256)
        for kind in MASKS[:2]
    },
    **{f"backward {H} {kind}": functools.partial(_backward, H, kind, False) for H in (64, 128, 256) for kind in MASKS},
    **{
        f"backward {H} {kind} deterministic": functools.partial(_backward, H, kind, True)
        for H in (64, 128)
        for kind in ("full", "causal")
    },
    "backward 128 delta": _delta,
    **{f"decode {n} dense": functools.partial(_decode, n, (32, 8), 128, "dense") for n in (1, 4, 8, 16)},
    "decode 1 dense, a head a group": functools.partial(_decode, 1, (8, 8), 128, "dense"),
    "decode 16 dense, sixteen heads a group": functools.partial(_decode, 16, (32, 2), 128, "dense"),
    "decode 4 dense 64": functools.partial(_decode, 4, (32, 8), 64, "dense"),
    "decode 4 dense 256": functools.partial(_decode, 4, (32, 8), 256, "dense"),
    "decode 4 pages": functools.partial(_decode, 4, (32, 8), 128, "pages"),
    "decode 4 ring": functools.partial(_decode, 4, (32, 8), 128, "ring"),
    **{
        f"decode {n} {kind}, clusters of {size}": functools.partial(
            _decode, n, (32, 8), 128, kind, block_keys=keys, stages=2, cluster=size
        )
        for n, kind, keys, size in (
            (1, "dense", 64, 16),
            (5, "dense", 64, 16),
            (5, "dense", 64, 8),
            (16, "dense", 64, 8),
            (5, "pages", 64, 8),
        )
    },
    **{
        f"matmul {rows} {tail}": functools.partial(_matmul, rows, tail)
        for rows in (16, 256, 8192)
        for tail in ("bias", "gated", "residual")
    },
    **{f"decode block {rows}": functools.partial(_decode_block, rows, BETWEEN) for rows in (1, 9)},
    "decode block 8, all options": functools.partial(_decode_block, 8, BETWEEN, options=True),
    "decode block 1, the first call": functools.partial(_decode_block, 1, ("qkv",)),
    "decode block 16, the last call": functools.partial(_decode_block, 16, BETWEEN[:3]),
    **{
        f"decode block {rows} with attention": functools.partial(_decode_block, rows, LAYER, tokens=rows, layers=4)
        for rows in (1, 9)
    },
    "decode block 8 rows with attention, all options": functools.partial(
        _decode_block, 8, LAYER, tokens=1, options=True, layers=4
    ),
    "decode block 5 with attention, heads of half a tile": functools.partial(_decode_block, 5, LAYER, tokens=5, H=64),
    PLANTED: _wide_tiles,
}


# In the process that compiles.


def main(names: list[str], variants: Mapping[str, Variant] = VARIANTS, compile_one: Any = None) -> None:
    """Compile variants and print what came of them.

    Args:
      names: of the variants; all where it is empty.
      variants: by name.
      compile_one: compiles a variant by its name; for an H200 by default.
    """
    compile_one = compile_one or (lambda name: compile_variant(variants[name], TARGET))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "MOSAIC_GPU_DUMP_TO": folder,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_DUMP_SASS": "1",
            "MOSAIC_GPU_DUMP_RESOURCES": "1",
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        }
        paths = {str(Path(found).parent) for found in (_tool("ptxas"), _tool("nvdisasm")) if found}
        os.environ["PATH"] = os.pathsep.join([*paths, os.environ.get("PATH", "")])
        for name in names or variants:
            compile_one(name)
            for report in _read(name, Path(folder)):
                print(json.dumps(dataclasses.asdict(report)), flush=True)
            for file in Path(folder).iterdir():
                file.unlink()  # a pass log takes up to 170 MB


def compile_variant(variant: Variant, target: Path) -> None:
    """Compile a variant for the GPU that a file describes."""
    import jax

    sharding = _sharding(target)
    function, arguments = variant(lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
    jax.jit(function).lower(*arguments).compile()


@functools.cache
def _sharding(target: Path) -> Any:
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="cuda", target_config=target.read_text(), topology="1x1x1")
    device = topology.devices[0]
    return NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())


def _read(variant: str, folder: Path) -> Iterator[Report]:
    for file in sorted(folder.glob("*.ptxas")):
        said = file.read_text()
        registers, stores = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
        resources = re.search(r"smem_scratch_bytes=(\d+)", file.with_suffix(".resources.txt").read_text())
        (code,) = (path.read_text() for path in folder.glob(f"{file.stem}.sass*"))
        assert registers
        assert stores
        assert resources
        yield Report(
            variant=variant,
            kernel=re.sub(r"_\d+$", "", file.stem),
            registers=int(registers[1]),
            spilled=int(stores[1]),
            serialized="wgmma.mma_async instructions are serialized" in said,
            shared_bytes=int(resources[1]),
            products=len(re.findall(r"\bHG?MMA\b", code)),
            relaxed=relaxed_arrivals(code),
            ahead=exponentials_ahead(code),
        )


if __name__ == "__main__":
    main(sys.argv[1:])
