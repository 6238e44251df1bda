"""Decoding of an 8B model against the bytes that a step must read, and speculative decoding against eq. 33.15."""

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import hugging_face, round_costs
from experiments.bandwidth_bound import read_rate, step_bytes
from experiments.compilation import build_all, build_both
from experiments.harness import Job
from experiments.large_pair import FUSED_HELP, SLOTS, agree, fused_by, random_prompt
from experiments.pairs import Pair
from experiments.programs import Programs, Timings, later_tokens_per_round, program_builders, time_decoding
from experiments.round_costs import Loop
from experiments.ruled_models import (
    SAMPLING,
    SMOKE,
    accepted_as_set,
    drafter_of,
    no_words,
    random_params,
    ruled_pair,
)
from experiments.scanned_decoder import scanned
from flashspec import costs, models
from flashspec.checks import at_least, fail
from flashspec.fusion.decode_block import BlockForm, Heads, plan_decode_block
from flashspec.language_model import LanguageModel, Params
from flashspec.measure import HOST, Checked, checked, compile_call
from flashspec.models import fused_step
from flashspec.models.checkpoint import stored_tensors
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter

QUESTION = "How near is decoding to the bytes that it must read, and speculation to eq. 33.15?"
NEEDS = "a GPU with 80 GB of memory; torch and transformers for the comparison with Hugging Face's generate"
TIME = "8 minutes on an H200"

STEP_BAR, STEP_AIM, VERIFY_BARS, SPEEDUP_BAR = 1.18, 1.10, {5: 1.05, 9: 1.08}, 0.05
SHAPES = ((1, 1), (1, 5), (1, 9), (8, 1))  # B, T
ACCEPTANCES, DRAFT_LENGTHS = (0.6, 0.8, 0.95), (2, 4, 8)
PLAIN = 1  # tokens of a forward of plain decoding
PLAIN_FORM, FUSED_FORM, SCAN_FORM = "layers one by one", "fused layers", "a scan over layers"
PARTS = ("forwards", "speculation", "hugging_face")
GREEDY = SamplingParams(temperature=0.0, top_k=None, top_p=None)
JUDGED = 64  # positions of the prompt whose logits Hugging Face's have to agree with


class Forward(NamedTuple):
    """Seconds of a forward, what its loop took to compile, and the least seconds that its bytes allow."""

    seconds: float
    compile_s: float
    bound: float

    @property
    def over(self) -> float:
        return self.seconds / self.bound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = tuple(models.PRESETS)
    parser.add_argument("--target", choices=presets, default="llama-3-8b", help="default: llama-3-8b")
    parser.add_argument("--draft", choices=presets, default="llama-3-1b-shape", help="default: llama-3-1b-shape")
    parser.add_argument("--draft-length", type=int, action="append", help="may be repeated (default: 2, 4, 8)")
    parser.add_argument("--acceptance", type=float, action="append", help="may be repeated (default: 0.6, 0.8, 0.95)")
    parser.add_argument("--capacity", type=int, default=2048, help="positions in the caches")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fused", action="store_true", help=f"{FUSED_HELP}; for the part `speculation`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the experiment (default: all)")


def run(job: Job) -> None:
    """Time forwards in all their forms, then generation."""
    args = job.args
    for name in ("capacity", "max_new_tokens", "repeats"):
        at_least(name.replace("_", "-"), getattr(args, name), 1)
    for length in args.draft_length or ():
        at_least("draft-length", length, 1)
    if not all(0 < acceptance < 1 for acceptance in args.acceptance or ()):
        raise fail("acceptance", "a number between 0 and 1", args.acceptance)
    if job.smoke:
        vars(args).update(capacity=64, max_new_tokens=24, repeats=1, acceptance=[0.8], draft_length=[2])
    config = _config(job, "target")
    model, params = models.as_language_model(config, jnp.bfloat16), random_params(config, job.seed)
    exact = checked("five tokens verified together are as one by one", lambda: agree(model, params))
    if not job.claim(exact.what, exact.passed):
        return
    own = {"target": params, "draft": random_params(_config(job, "draft"), job.seed + 1)}
    if "forwards" in args.parts:
        rate = read_rate(job.smoke)
        forwards(job, model, params, config, rate)
        draft_forwards(job, own["draft"], _config(job, "draft"), rate)
    if "speculation" in args.parts:
        speculation(job, own, exact)
    if "hugging_face" in args.parts:
        against_hugging_face(job, own, exact)


def _config(job: Job, role: str) -> models.DecoderConfig:
    """Without stop tokens, so that every generation has its full length."""
    config = SMOKE[role] if job.smoke else models.PRESETS[getattr(job.args, role)]
    return dataclasses.replace(config, eos_token_ids=())


def forwards(job: Job, model: LanguageModel, params: Params, config: models.DecoderConfig, rate: float) -> None:
    """One token and several: layers as the decoder has them, fused, and as a scan."""
    shapes = SHAPES[:2] if job.smoke else SHAPES
    scan, stacked = scanned(config, params, model)
    forms: dict[str, tuple[LanguageModel, Params]] = {PLAIN_FORM: (model, params), SCAN_FORM: (scan, stacked)}
    other = fused_model(job, config, shapes)
    if other is not None:
        forms[FUSED_FORM] = other, params
    if not all(same_logits(job, forms)):
        return
    with job.console.status("compiling"):
        # Alone, since their times of compilation are compared.
        loops = {(form, (1, PLAIN)): _forward_loop(job, *forms[form], (1, PLAIN)) for form in (PLAIN_FORM, SCAN_FORM)}
        others = [(form, sizes) for form in forms if form != SCAN_FORM for sizes in shapes]
        builders = {
            (form, sizes): functools.partial(_forward_loop, job, *forms[form], sizes)
            for form, sizes in others
            if (form, sizes) not in loops
        }
        loops |= build_all(builders)

    def timed(form: str, sizes: tuple[int, int]) -> Forward:
        bound, loop = step_bytes(config, sizes[0], job.args.capacity // 2) / rate, loops[form, sizes]
        return Forward(loop.seconds(), loop.call.compile_s or 0.0, bound)

    plain = {sizes: timed(PLAIN_FORM, sizes) for sizes in job.track(shapes, "forwards")}
    report_plain(job, plain, rate)
    if other is not None:
        report_fused(job, plain, {sizes: timed(FUSED_FORM, sizes) for sizes in shapes})
    report_scan(job, plain[1, PLAIN], timed(SCAN_FORM, (1, PLAIN)))


def draft_forwards(job: Job, params: Params, config: models.DecoderConfig, rate: float) -> None:
    """One token through the draft, whose small kernels weigh more: layers one by one, and as one kernel."""
    sizes = (1, PLAIN)
    forms = {PLAIN_FORM: (models.as_language_model(config, jnp.bfloat16), params)}
    other = fused_model(job, config, (sizes,))
    if other is not None:
        forms[FUSED_FORM] = other, params
    if not all(same_logits(job, forms)):
        return
    with job.console.status("compiling"):
        loops = build_all({form: functools.partial(_forward_loop, job, *each, sizes) for form, each in forms.items()})
    bound, rows = step_bytes(config, 1, job.args.capacity // 2) / rate, []
    for form, loop in loops.items():
        seconds = loop.seconds()
        rows.append([form, 1e3 * seconds, 1e3 * bound, seconds / bound])
        settings = {"form": form, "capacity": job.args.capacity}
        values = {"bound_s": bound, "over_bound": seconds / bound}
        job.record("draft forward", settings=settings, clock=HOST, steady_s=seconds, check="agrees", values=values)
    job.table("draft", "The draft, B = 1, T = 1", ["form", "ms", "bound, ms", "over the bound"], rows)


def _forward_loop(job: Job, model: LanguageModel, params: Params, sizes: tuple[int, int]) -> Loop:
    """Forwards over T tokens of B rows whose caches are half full."""
    few = {"steps": 2, "repeats": 1} if job.smoke else {"repeats": job.args.repeats}
    shape = round_costs.Shape(sizes[0], job.args.capacity, **few)
    return round_costs.forward_loop(model, params, sizes[1], shape)


def same_logits(job: Job, forms: Mapping[str, tuple[LanguageModel, Params]]) -> list[bool]:
    """Whether the other forms of a model have the logits of the first, to bfloat16's rounding."""
    tokens = jax.random.randint(jax.random.key(job.seed), (1, 8), 0, forms[PLAIN_FORM][0].vocab_size)
    calls = build_all(
        {
            form: functools.partial(compile_call, model.apply, params, tokens, model.init_cache(1, SLOTS))
            for form, (model, params) in forms.items()
        }
    )
    logits = {form: np.asarray(call()[0]) for form, call in calls.items()}
    one = logits.pop(PLAIN_FORM)
    return [
        job.claim(f"{form}: logits of {PLAIN_FORM}, to rounding", np.abs(one - two).max() < 0.05 * np.abs(one).max())
        for form, two in logits.items()
    ]


def report_plain(job: Job, found: Mapping[tuple[int, int], Forward], rate: float) -> None:
    """Forwards of the public path, with what they are held to."""
    for (batch, width), each in found.items():
        values = {"bound_s": each.bound, "over_bound": each.over}
        settings = {"batch": batch, "tokens": width, "capacity": job.args.capacity}
        job.record(f"forward B {batch} T {width}", settings=settings, clock=HOST, steady_s=each.seconds, values=values)
    rows = [
        [batch, width, 1e3 * each.seconds, 1e3 * each.bound, each.over, each.seconds / found[batch, PLAIN].seconds]
        for (batch, width), each in found.items()
    ]
    columns = ["B", "T", "ms", "bound, ms", "over the bound", "over T = 1"]
    job.table("forwards", f"Forwards, cache {job.args.capacity} half full; {rate / 1e12:.2f} TB/s read", columns, rows)
    if job.smoke:
        return
    for batch in (1, 8):
        over = found[batch, PLAIN].over
        job.goal(f"B = {batch}: a step is {over:.3f} of its bound, {STEP_BAR} allowed", over <= STEP_BAR)
    over = found[1, PLAIN].over
    job.goal(f"B = 1: {over:.3f} of the bound, {STEP_AIM} aimed at", over <= STEP_AIM)
    for width, bar in VERIFY_BARS.items():
        ratio = found[1, width].seconds / found[1, PLAIN].seconds
        job.goal(f"verifying {width} tokens costs {ratio:.3f} of one, {bar} allowed", ratio <= bar)
    with job.figure("forwards", "Forwards over the bound of their bytes") as axes:
        names = [f"B {batch}, T {width}" for batch, width in found]
        axes.bar(names, [each.over for each in found.values()])
        axes.axhline(STEP_BAR, linestyle="--", color="gray", label=f"{STEP_BAR}")
        axes.legend()


def fused_model(job: Job, config: models.DecoderConfig, shapes: tuple[tuple[int, int], ...]) -> LanguageModel | None:
    """The model with its layers fused, where the kernel takes it; in a smoke run the kernel's twin."""
    heads = Heads(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    form = BlockForm(heads, config.rms_norm_eps)
    widest = max(batch * width for batch, width in shapes)
    plan = plan_decode_block(widest, config.hidden_size, config.intermediate_size, form)
    reasons = fused_step.refusals(config) + (() if job.smoke else plan.rejected.get("hopper", ()))
    if reasons:
        job.say(f"{FUSED_FORM}: not here: {'; '.join(reasons)}")
        return None
    return models.as_language_model(config, jnp.bfloat16, decode_block=fused_by(job))


def report_fused(job: Job, plain: Mapping[tuple[int, int], Forward], found: Mapping[tuple[int, int], Forward]) -> None:
    """The same forwards with fused layers."""
    rows = []
    for (batch, width), own in found.items():
        each = plain[batch, width]
        rows.append([batch, width, 1e3 * each.seconds, 1e3 * own.seconds, own.over, each.seconds / own.seconds])
        settings = {"batch": batch, "tokens": width, "capacity": job.args.capacity}
        values = {"over_bound": own.over, "speed_over_plain": each.seconds / own.seconds}
        name = f"fused forward B {batch} T {width}"
        job.record(name, settings=settings, clock=HOST, steady_s=own.seconds, check="agrees", values=values)
    columns = ["B", "T", "one by one, ms", "fused, ms", "over the bound", "its speed over theirs"]
    job.table("fused", "Fused layers", columns, rows)


def report_scan(job: Job, unrolled: Forward, found: Forward) -> None:
    """The same step as a scan over stacked layers: what it saves in compilation, and what it costs."""
    rows = [
        [name, 1e3 * each.seconds, each.over, each.compile_s]
        for name, each in {"one by one": unrolled, "a scan": found}.items()
    ]
    job.table("scan", "Layers one by one, or scanned (B = 1, T = 1)", ["layers", "ms", "over", "compile, s"], rows)
    values = {"over_unrolled": found.seconds / unrolled.seconds, "compile_s": found.compile_s}
    job.record("scan over layers", clock=HOST, steady_s=found.seconds, check="agrees", values=values)


def speculation(job: Job, own: Mapping[str, Params], exact: Checked) -> None:
    """Measured speed-up beside eq. 33.15 with measured costs, for every acceptance and draft length."""
    args = job.args
    acceptances = args.acceptance or ACCEPTANCES
    pair = ruled_pair(
        {role: _config(job, role) for role in own}, own, acceptances[0], fused_by(job) if args.fused else None
    )
    lengths = args.draft_length or DRAFT_LENGTHS
    batches = [random_prompt(job, pair.config.vocab_size, max(lengths))]
    few = {"steps": 2, "repeats": 1} if job.smoke else {}
    shape = round_costs.Shape(1, args.capacity, **few)
    with job.console.status("compiling"):
        loops, programs = build_both(
            round_costs.part_loops(pair, lengths, SAMPLING, shape),
            program_builders(pair, (0, *lengths), batches[0], SAMPLING, "chain", args.max_new_tokens),
        )
    found: dict[float, dict[int, Speedup]] = {acceptance: {} for acceptance in acceptances}
    parts = round_costs.parts(loops)
    for length in job.track(lengths, "draft lengths"):
        fast = programs[length]
        for acceptance in acceptances:
            fast.constants = (pair.target_params, drafter_of(pair, acceptance))  # the same program
            timings = time_decoding(Programs(programs[0], fast), batches, SAMPLING, job.seed, exact, args.repeats)
            found[acceptance][length] = _compare(job, timings, parts[length], acceptance, length)
    _report(job, found)


class Speedup(NamedTuple):
    """Of one acceptance and draft length; `expected` is E[N] of a round that no budget cuts short.

    The speed-ups are of the rounds after the first, which the time to the first token holds; None where there are none.
    """

    acceptance: float
    tokens_per_round: float
    expected: float
    measured: float | None
    predicted: float | None

    @property
    def apart(self) -> float | None:
        return None if self.measured is None or self.predicted is None else self.measured / self.predicted - 1


def _compare(job: Job, timings: Timings, parts: costs.RoundCosts, acceptance: float, length: int) -> Speedup:
    info = timings.outcomes[0].info
    emitted, rounds, accepted, tested = (
        int(np.asarray(counts).sum()) for counts in (info.emitted, info.rounds, info.accepted, info.tested)
    )
    job.claim(
        f"D = {length}: acceptance {accepted / tested:.3f} of {tested} drafts, {acceptance} set",
        accepted_as_set(accepted, tested, acceptance),
    )
    # Tokens a round are those of this run: its draws and its budget are not what eq. 33.15 is asked about.
    estimate, later = costs.estimate_round(acceptance, length, parts), later_tokens_per_round(info)
    predicted = None if later is None else float(parts.target_step * later / estimate.round_time)
    plain, fast = timings.plain.tpot_s, timings.speculative.tpot_s
    measured = None if plain is None or fast is None or later is None else plain / fast
    found = Speedup(accepted / tested, emitted / rounds, float(estimate.expected_tokens), measured, predicted)
    settings = {"acceptance": acceptance, "draft_length": length}
    values = {**found._asdict(), **round_costs.symbols(parts, length)}
    values |= {"plain_s": plain, "speculative_s": fast, "later_tokens_per_round": later}
    job.record("speed-up", settings=settings, clock=HOST, check="agrees", values=values)
    return found


def _report(job: Job, found: dict[float, dict[int, Speedup]]) -> None:
    rows = []
    for acceptance, by_length in found.items():
        for length, each in by_length.items():
            apart = each.apart
            if apart is not None and not job.smoke:
                text = f"acceptance {acceptance}, D = {length}: speed-up {each.measured:.2f}, {apart:+.1%} of eq. 33.15"
                job.goal(text, abs(apart) <= SPEEDUP_BAR)
            shown = None if apart is None else f"{apart:+.1%}"
            row = (each.tokens_per_round, each.expected, each.measured, each.predicted)
            rows.append([acceptance, length, *row, shown])
    columns = ["acceptance", "D", "tokens a round", "E[N]", "speed-up", "by eq. 33.15", "apart"]
    names = "tiny models" if job.smoke else f"{job.args.target} with {job.args.draft}"
    job.table("speedup", f"{names}, B = 1", columns, rows)
    with job.figure("speedup", "Speed-up, measured (points) and by eq. 33.15 (lines)") as axes:
        for acceptance, by_length in found.items():
            line = axes.plot(list(by_length), [each.predicted or np.nan for each in by_length.values()])[0]
            measured = [each.measured or np.nan for each in by_length.values()]
            axes.plot(list(by_length), measured, "o", color=line.get_color(), label=f"acceptance {acceptance}")
        axes.set(xlabel="draft length D", ylabel="speed-up over plain decoding")
        axes.legend()


def against_hugging_face(job: Job, own: Mapping[str, Params], exact: Checked) -> None:
    """Hugging Face's generate on the same weights: greedy, plain and with the same draft.

    Random models agree on next to nothing, so that speculation loses in both: what is compared is the time of a round.
    """
    absent = hugging_face.missing()
    if absent is not None:
        job.say(absent)
        return
    length, configs = (2 if job.smoke else 4), {role: _config(job, role) for role in own}
    language = {role: models.as_language_model(config, jnp.bfloat16) for role, config in configs.items()}
    drafter = ModelDrafter(language["draft"], own["draft"])
    pair = Pair(configs["target"], language["target"], own["target"], drafter, no_words(), jnp.bfloat16)
    batches = [random_prompt(job, configs["target"].vocab_size, length)]
    facts = (batches[0], GREEDY, "chain", job.args.max_new_tokens)
    programs = Programs(*build_all(program_builders(pair, (0, length), *facts)).values())
    timings = time_decoding(programs, batches, GREEDY, job.seed, exact, job.args.repeats)
    times = {"plain": timings.plain.tpot_s, "speculative": timings.speculative.tpot_s}
    ours = {way: seconds for way, seconds in times.items() if seconds is not None}
    prompt = batches[0].tokens
    judged = jnp.asarray(prompt[:, :JUDGED])
    model = language["target"]
    wanted, _ = jax.jit(model.apply)(own["target"], judged, model.init_cache(1, judged.shape[1]))
    weights = {role: (configs[role].to_hf("bfloat16"), stored_tensors(configs[role], own[role])) for role in own}
    rows = hugging_face.compare(
        ours,
        *weights["target"],
        prompt,
        job.args.max_new_tokens,
        wanted=np.asarray(wanted),
        draft=weights["draft"],
        draft_length=length,
        repeats=job.args.repeats,
        say=job.say,
    )
    if not rows:
        return
    columns = ["way", "ms a token", "tokens a second", *(f"ours, {way}, over it" for way in ours)]
    title = f"Hugging Face's generate, B = 1, greedy, D = {length}; ours take"
    title += ", ".join(f" {1e3 * seconds:.2f} ms a token {way}" for way, seconds in ours.items())
    job.table("hugging_face", title, columns, rows)
    for way, milliseconds, _, *ratios in rows:
        values = dict(zip((f"{name}_over_it" for name in ours), ratios, strict=True))
        job.record(f"Hugging Face, {way}", clock=HOST, steady_s=milliseconds / 1e3, check="agrees", values=values)
