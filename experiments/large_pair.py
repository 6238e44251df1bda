"""A large checkpoint and its draft: written, loaded, and decoded by the ordinary path, at acceptances that are set."""

import argparse
import dataclasses
import functools
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import round_costs
from experiments.bandwidth_bound import read_rate, step_bytes
from experiments.compilation import build_all, build_both
from experiments.harness import Job
from experiments.host_memory import AnonymousPeak
from experiments.programs import Programs, Prompts, Timings, later_tokens_per_round, program_builders, time_decoding
from experiments.ruled_models import SAMPLING, SMOKE, accepted_as_set, drafter_of, random_params, ruled_pair
from flashspec import costs, models
from flashspec.checks import at_least, fail
from flashspec.language_model import LanguageModel, Params
from flashspec.measure import HOST, checked, compile_call
from flashspec.models.parameter_layout import slots

QUESTION = "Does a large checkpoint load fast, and decode as fast as its bytes and eq. 33.15 allow?"
NEEDS = "a GPU with 60 GB of memory, and 20 GB of disk or memory for --folder"
TIME = "6 minutes on an H200"

LOAD_BAR, PLAIN_BAR, VERIFY_BARS, SPEEDUP_BAR = 2e9, 1.18, {4: 1.05, 8: 1.08}, 0.05
HOST_ALLOWANCE = 1_000_000_000
PARTS = ("loading", "decoding")
SLOTS = 128  # of a cache that the fused layers take
FUSED_HELP = "decode some layers by one kernel (decode_block), both models; in a smoke run by its twin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=tuple(models.PRESETS), default="qwen3-8b", help="default: qwen3-8b")
    parser.add_argument("--draft", choices=tuple(models.PRESETS), default="qwen3-0.6b", help="default: qwen3-0.6b")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go for the run (default: the output folder)")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--acceptance", type=float, action="append", help="may be repeated (default: 0.6, 0.8, 0.95)")
    parser.add_argument("--capacity", type=int, default=2048, help="positions in the caches")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fused", action="store_true", help=FUSED_HELP)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="of the experiment (default: both); without loading, "
        "weights are made on the device and no checkpoint is written",
    )


def run(job: Job) -> None:
    """Write both checkpoints and load them, and decode."""
    args = job.args
    for name in ("draft_length", "capacity", "max_new_tokens", "repeats"):
        at_least(name.replace("_", "-"), getattr(args, name), 1)
    if not all(0 < acceptance < 1 for acceptance in args.acceptance or ()):
        raise fail("acceptance", "a number between 0 and 1", args.acceptance)
    if args.folder is not None and not args.folder.is_dir():
        raise fail("folder", "a folder that exists", args.folder)
    if job.smoke:
        vars(args).update(capacity=64, max_new_tokens=24, repeats=1, acceptance=[0.8], draft_length=2)
    names = {"target": args.target, "draft": args.draft}
    configs = SMOKE if job.smoke else {role: models.PRESETS[name] for role, name in names.items()}
    configs = {role: dataclasses.replace(config, eos_token_ids=()) for role, config in configs.items()}
    if "loading" in args.parts:
        with tempfile.TemporaryDirectory(dir=args.folder or job.out) as folder:
            for role, config in configs.items():
                write(job, Path(folder) / role, config)
            params = {role: load(job, Path(folder) / role, role, config) for role, config in configs.items()}
    else:
        params = {role: random_params(config, job.seed) for role, config in configs.items()}
    if "decoding" in args.parts:
        decode(job, configs, params)


def write(job: Job, folder: Path, config: models.DecoderConfig) -> None:
    """A checkpoint of random weights."""
    with job.console.status(f"writing {2 * config.num_parameters / 1e9:.2f} GB"):
        models.save(folder, config, random_params(config, job.seed))


def load(job: Job, folder: Path, role: str, config: models.DecoderConfig) -> Params:
    """The checkpoint from the page cache, timed at the second reading; the first compiles what joins its tensors."""
    before = jax.block_until_ready(models.load(folder).params)
    sums = fingerprint(before)
    for leaf in jax.tree.leaves(before):
        leaf.delete()
    size = 2 * config.num_parameters
    with AnonymousPeak() as memory:
        start = time.perf_counter()
        params = jax.block_until_ready(models.load(folder).params)
        seconds = time.perf_counter() - start
    same = job.claim(f"{role}: two readings give the same bits", fingerprint(params) == sums)
    largest = max(2 * sum(np.prod(shape) for shape in slot.shapes.values()) for slot in slots(config))
    held = memory.growth - (size if jax.default_backend() == "cpu" else 0)
    job.claim(
        f"{role}: {held / 1e9:.2f} GB of anonymous memory at most, under its largest tensor plus 1 GB",
        bool(held < largest + HOST_ALLOWANCE),
    )
    if same:
        text = f"{role}: {size / 1e9:.2f} GB in {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s from the page cache"
        bar = LOAD_BAR if not job.smoke else 0.0
        job.goal(f"{text}, {bar / 1e9:.0f} asked for", size / seconds >= bar)
        values = {"bytes": size, "anonymous_bytes": held, "load_s": seconds}
        job.record(
            f"load {role}", settings={"layers": config.num_layers}, clock=HOST, check="equal bits", values=values
        )
    return params


def fingerprint(params: Params) -> list[int]:
    """A sum of the bits of every leaf."""
    bits = (jax.lax.bitcast_convert_type(leaf, jnp.uint16) for leaf in jax.tree.leaves(params))
    return [int(jnp.sum(leaf, dtype=jnp.uint32)) for leaf in bits]


def decode(job: Job, configs: dict[str, models.DecoderConfig], loaded: dict[str, Params]) -> None:
    """Plain and speculative decoding at each acceptance, against the read rate and against eq. 33.15."""
    args, vocab_size = job.args, configs["target"].vocab_size
    decode_block = fused_by(job) if args.fused else None
    target = models.as_language_model(configs["target"], jnp.bfloat16, decode_block=decode_block)
    exact = checked("five tokens verified together are as one by one", lambda: agree(target, loaded["target"]))
    if not job.claim(exact.what, exact.passed):
        return
    acceptances = args.acceptance or [0.6, 0.8, 0.95]
    pair = ruled_pair(configs, loaded, acceptances[0], decode_block)
    lengths = [args.draft_length] if job.smoke else sorted({*VERIFY_BARS, args.draft_length})
    shape = round_costs.Shape(1, args.capacity, **({"steps": 2, "repeats": 1} if job.smoke else {}))
    batches = [random_prompt(job, vocab_size, args.draft_length)]
    with job.console.status("compiling"):
        loops, built = build_both(
            round_costs.part_loops(pair, lengths, SAMPLING, shape),
            program_builders(pair, (0, args.draft_length), batches[0], SAMPLING, "chain", args.max_new_tokens),
        )
    programs = Programs(*built.values())
    parts = round_costs.parts(loops)[args.draft_length]
    over_bound = report_steps(job, parts, configs["target"], shape)
    rows = []
    for acceptance in acceptances:
        programs.speculative.constants = (pair.target_params, drafter_of(pair, acceptance))  # the same program
        timings = time_decoding(programs, batches, SAMPLING, job.seed, exact, args.repeats)
        rows.append(compare(job, timings, parts, acceptance))
    columns = [
        "acceptance",
        "tokens a round",
        "speed-up",
        "by eq. 33.15",
        "apart",
        "plain, ms",
        "a round, ms",
        "its parts, ms",
    ]
    models_of = "tiny models" if job.smoke else f"{args.target} with {args.draft}"
    job.table("speedup", f"{models_of}, D = {args.draft_length}, B = 1", columns, rows)
    speedups = [row[2] for row in rows if row[2] is not None]
    if speedups:
        job.reaches(
            "a large model and its draft",
            f"{models_of}: a step in {over_bound:.2f} of the time of its bytes; {min(speedups):.2f} to "
            f"{max(speedups):.2f} times as fast with {args.draft_length} drafts at acceptances of "
            f"{min(acceptances)} to {max(acceptances)}",
        )


def fused_by(job: Job) -> str:
    """Who computes a fused step: the kernel, or in a smoke run its twin."""
    return "xla" if job.smoke else "hopper"


def agree(model: LanguageModel, params: Params) -> bool:
    """Whether the logits of five new tokens in one forward are those of five forwards, to bfloat16's rounding."""
    tokens = jax.random.randint(jax.random.key(1), (1, 21), 0, model.vocab_size)
    assert model.prefill is not None
    empty, count = model.init_cache(1, SLOTS), jnp.array([16], jnp.int32)
    built = build_all(
        {
            "fill": functools.partial(compile_call, model.prefill, params, tokens[:, :16], count, empty),
            "five": functools.partial(compile_call, model.apply, params, tokens[:, 16:], empty),
            "one": functools.partial(compile_call, model.apply, params, tokens[:, :1], empty),
        }
    )
    cache = built["fill"]()
    together, _ = built["five"].executable(params, tokens[:, 16:], cache)
    single = []
    for t in range(16, 21):
        logits, cache = built["one"].executable(params, tokens[:, t : t + 1], cache)
        single.append(logits)
    one, other = np.asarray(together), np.asarray(jnp.concatenate(single, axis=1))
    return bool(np.abs(one - other).max() < 0.1 * np.abs(other).max())


def report_steps(job: Job, parts: costs.RoundCosts, config: models.DecoderConfig, shape: round_costs.Shape) -> float:
    """Forwards over one token and several, with what they are held to; one token's time over that of its bytes."""
    step, verify = float(parts.target_step), parts.verify
    assert isinstance(verify, Mapping)
    rate = read_rate(job.smoke)
    bound = step_bytes(config, shape.batch, shape.capacity // 2) / rate
    rows = [["1 token", 1e3 * step, step / bound, None]]
    rows += [
        [f"{length + 1} tokens", 1e3 * seconds, seconds / bound, seconds / step] for length, seconds in verify.items()
    ]
    columns = ["forward", "ms", "over the bandwidth bound", "over one token"]
    job.table("steps", f"Forwards at B = 1, cache {shape.capacity}; {rate / 1e12:.2f} TB/s read", columns, rows)
    if not job.smoke:
        job.goal(f"a step is {step / bound:.3f} of its bound, {PLAIN_BAR} allowed", step / bound <= PLAIN_BAR)
        for length, bar in VERIFY_BARS.items():
            over = verify[length] / step
            job.goal(f"verifying {length + 1} tokens costs {over:.3f} of one, {bar} allowed", over <= bar)
    return step / bound


def random_prompt(job: Job, vocab_size: int, draft_length: int) -> Prompts:
    """One prompt that fills the caches but for the new tokens and the drafts."""
    size = job.args.capacity - job.args.max_new_tokens - draft_length
    if size < 1:
        raise fail("capacity", "more than max-new-tokens and draft-length together", job.args.capacity)
    tokens = np.random.default_rng(job.seed).integers(0, vocab_size, (1, size)).astype(np.int32)
    return Prompts(tokens, np.array([size], np.int32))


def compare(job: Job, timings: Timings, parts: costs.RoundCosts, acceptance: float) -> list[Any]:
    """One line of the table: measured against eq. 33.15, with the acceptance that was reached."""
    outcome, length = timings.outcomes[0], job.args.draft_length
    emitted, rounds = int(outcome.info.emitted.sum()), int(outcome.info.rounds.sum())
    accepted, tested = (int(np.asarray(counts).sum()) for counts in (outcome.info.accepted, outcome.info.tested))
    job.claim(
        f"acceptance {accepted / tested:.3f} of {tested} drafts, {acceptance} set",
        accepted_as_set(accepted, tested, acceptance),
    )
    per_round, later = emitted / rounds, later_tokens_per_round(outcome.info)
    plain, fast = timings.plain.tpot_s, timings.speculative.tpot_s
    if plain is None or fast is None or later is None:
        job.say(f"acceptance {acceptance}: what came after the first round took no time that the clock can tell")
        return [acceptance, per_round, *[None] * 6]
    # What this run reached, so that the prediction is of times alone.
    seconds = costs.estimate_round(acceptance, length, parts).round_time
    measured, predicted = plain / fast, float(plain * later / seconds)
    apart = measured / predicted - 1
    if not job.smoke:
        job.goal(
            f"acceptance {acceptance}: speed-up {measured:.2f}, {apart:+.1%} of eq. 33.15", abs(apart) <= SPEEDUP_BAR
        )
    values = {"tokens_per_round": per_round, "later_tokens_per_round": later}
    values |= {"speedup": measured, "predicted": predicted, **round_costs.symbols(parts, length)}
    job.record(f"acceptance {acceptance}", settings={"draft_length": length}, clock=HOST, check="agrees", values=values)
    times = plain, fast * later, seconds
    return [acceptance, per_round, measured, predicted, f"{apart:+.1%}", *(1e3 * float(each) for each in times)]
