"""The main job: plain and speculative decoding of real prompts, how fast each is, and whether the second is exact."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import greedy_check, law_check, round_costs, speculative_report
from experiments.harness import Job
from experiments.pairs import Pair, bundled_prompts, load_pair
from experiments.programs import Outcome, Programs, Prompts, batches_of, compile_programs, time_decoding
from flashspec import costs
from flashspec.checks import at_least, fail
from flashspec.measure import Checked
from flashspec.sampling import SamplingParams

QUESTION = "How much faster does a draft make decoding, and are the tokens exactly the target's?"
NEEDS = "nothing beyond the installation; checkpoints of your own with --target and --draft"
TIME = "2 minutes on 2 CPU cores, 2 minutes on an H200"

AUTO = "auto"
LONGEST_AUTO = 8
PREFIXES = 4
MOST_TOKENS = 2**31 - 1  # the largest count that a device holds
SMOKE_LAYERS = 3
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, help="a checkpoint directory (default: the bundled target)")
    parser.add_argument("--draft", help="a checkpoint directory, 'ngram', or 'layers:L' (default: the bundled draft)")
    parser.add_argument("--prompt", action="append", help="a prompt; may be repeated (default: the bundled prompts)")
    parser.add_argument("--prompt-file", action="append", type=Path, help="a text file, or a .json list of strings")
    parser.add_argument("--draft-length", default="4", help="draft tokens a round, or 'auto' (default: 4)")
    parser.add_argument("--rule", choices=("chain", "match"), default="chain", help="of verification (default: chain)")
    parser.add_argument("--temperature", type=float, default=0.8, help="default: 0.8")
    parser.add_argument("--top-k", type=int, default=0, help="default: 0, which keeps all")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: 1, which keeps all")
    parser.add_argument("--min-p", type=float, default=0.0, help="default: 0, which keeps all")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats, of which the median counts (default: 3)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, bfloat16 elsewhere")
    parser.add_argument("--law-draws", type=int, default=50_000, help="draws at each of 4 prefixes (default: 50,000)")


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is decoded, with what: the models, the prompts one by one and in batches, the sampling settings."""

    job: Job
    pair: Pair
    prompts: Prompts
    batches: list[Prompts]
    sampling: SamplingParams

    def programs(self, draft_length: int, pair: Pair | None = None) -> Programs:
        """Both ways of decoding, compiled."""
        args = self.job.args
        with self.job.console.status("compiling plain and speculative decoding"):
            return compile_programs(
                pair or self.pair, self.batches, self.sampling, draft_length, args.rule, args.max_new_tokens
            )

    def round_costs(self, draft_lengths: range, target_step: float | None = None) -> costs.RoundCosts:
        """The symbols of eq. 33.15, each measured as a compiled loop at the sizes of the workload."""
        pair, batch = self.pair, self.batches[0].tokens.shape[0]
        capacity = self.batches[0].tokens.shape[1] + self.job.args.max_new_tokens + draft_lengths[-1]
        few = {"steps": 4, "repeats": 1} if self.job.smoke else {}
        shape = round_costs.Shape(batch, capacity, **few)

        def forward(width: int) -> float:
            return round_costs.forward_seconds(pair.target, pair.target_params, width, shape)

        lengths = self.job.track(draft_lengths, "timing the parts of a round")
        return costs.RoundCosts(
            target_step=forward(1) if target_step is None else target_step,
            draft_step=round_costs.draft_seconds(pair.drafter, draft_lengths[-1], shape),
            verify={length: forward(length + 1) for length in lengths},
            overhead=round_costs.management_seconds(
                pair.target.vocab_size, pair.drafter, draft_lengths[-1], self.sampling, shape
            ),
        )


def run(job: Job) -> None:
    """Load, check exactness in float32, time both ways of decoding, compare with eq. 33.15."""
    workload, texts = read_workload(job)
    draft_length = choose_draft_length(workload)
    programs = workload.programs(draft_length)
    exact = check_exactness(workload, programs, draft_length)
    if not exact.passed:
        job.say("A wrong result has no speed: nothing was timed.")
        return
    timings = time_decoding(programs, workload.batches, workload.sampling, job.seed, exact, job.args.repeats)
    parts = workload.round_costs(range(draft_length, draft_length + 1), timings.plain.tpot_s)
    speculative_report.write(job, workload.pair, timings, parts, draft_length, exact)
    speculative_report.show_texts(job, workload.pair.tokenizer, texts, workload.batches, timings)


def read_workload(job: Job) -> tuple[Workload, list[str]]:
    """Check the options, load the models, encode the prompts."""
    args = job.args
    for name in ("batch", "max_new_tokens", "repeats", "law_draws"):
        at_least(name.replace("_", "-"), getattr(args, name), 1)
    if job.smoke:
        vars(args).update(max_new_tokens=min(args.max_new_tokens, 16), repeats=1, law_draws=4096)
    if args.draft_length != AUTO and not (args.draft_length.isdecimal() and int(args.draft_length)):
        raise fail("draft-length", "a number of tokens of at least 1, or 'auto'", repr(args.draft_length))
    # None leaves a step out of the compiled programs, which is what a run with fixed settings wants.
    top_k, top_p = min(args.top_k, MOST_TOKENS) or None, None if args.top_p == 1 else args.top_p
    sampling = SamplingParams(args.temperature, top_k, top_p, args.min_p)
    sampling.check(args.batch, 1)
    texts = read_prompts(args)[: 2 if job.smoke else None]
    dtype = DTYPES[args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")]
    pair = load(job, dtype)
    prompts = Prompts(*pair.tokenizer.encode(texts))
    if not prompts.lengths.all():
        raise fail("prompt", "at least one token in each prompt", repr(texts[int(prompts.lengths.argmin())]))
    counts = parameter_count(pair.target_params), parameter_count(getattr(pair.drafter, "params", ()))
    job.say(
        f"target: {counts[0]}, draft: {counts[1]}, {np.dtype(dtype).name}; {len(texts)} prompts of "
        f"{prompts.lengths.min()} to {prompts.lengths.max()} tokens, {args.batch} at a time, "
        f"{args.max_new_tokens} new tokens each"
    )
    longest, trained = int(prompts.lengths.max()) + args.max_new_tokens, pair.config.max_position_embeddings
    if longest > trained:
        job.say(
            f"note: {longest} positions are decoded, and the target was trained for {trained}: the text may lose its "
            "sense, which changes neither what is exact nor how it is measured"
        )
    return Workload(job, pair, prompts, batches_of(prompts, args.batch), sampling), texts


def load(job: Job, dtype: Any) -> Pair:
    """The pair that is asked for; a smoke run makes do with the target's first layers."""
    return load_pair(job.args.target, job.args.draft, dtype, layers=SMOKE_LAYERS if job.smoke else None)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, or the bundled ones."""
    prompts = list(args.prompt or ())
    if not all(prompts):
        raise fail("prompt", "a text that is not empty", "''")
    for path in args.prompt_file or ():
        prompts += read_prompt_file(path)
    for prompt in prompts:
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise fail("prompt", "text in Unicode", f"{prompt[:40]!a}")
    return prompts or bundled_prompts()


def read_prompt_file(path: Path) -> list[str]:
    """The one prompt that a text file holds, or the list of them in a .json file."""
    if not path.is_file():
        raise fail("prompt-file", "a file that exists", path)
    try:
        text = path.read_text(encoding="utf-8")
        prompts = json.loads(text) if path.suffix == ".json" else [text]
    except (OSError, ValueError) as error:
        raise fail("prompt-file", "text in UTF-8, or JSON in a .json file", f"{path} ({error})") from error
    if not isinstance(prompts, list) or not prompts:
        raise fail("prompt-file", "a list of strings in a .json file", f"{path} with {json.dumps(prompts)[:40]}")
    for prompt in prompts:
        if not isinstance(prompt, str) or not prompt:
            raise fail("prompt-file", "prompts that are texts and not empty", f"{path} with {json.dumps(prompt)[:40]}")
    return prompts


def parameter_count(params: Any) -> str:
    """Parameters of a tree, in words."""
    return f"{sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6:.2f} M parameters"


def choose_draft_length(workload: Workload) -> int:
    """The draft length asked for, or the best by eq. 33.15 for the measured costs and acceptance."""
    job, pair = workload.job, workload.pair
    if job.args.draft_length != AUTO:
        return int(job.args.draft_length)
    pilot = workload.programs(LONGEST_AUTO).speculative.run(workload.batches, workload.sampling, job.seed)
    acceptance = speculative_report.reached(speculative_report.acceptance_of(pilot))
    parts = workload.round_costs(range(1, LONGEST_AUTO + 1))
    best = costs.best_draft_length(acceptance, parts, draft_forwards=pair.draft_forwards)
    job.say(f"draft length {best.draft_length}: the best of {LONGEST_AUTO} by eq. 33.15, {best.speedup:.2f} predicted")
    return best.draft_length


def check_exactness(workload: Workload, programs: Programs, draft_length: int) -> Checked:
    """Greedy tokens and the law of sampled ones, in float32 at the highest precision, whatever the timed dtype."""
    job, pair = workload.job, workload.pair
    if pair.dtype != jnp.float32:
        pair = load(job, jnp.float32)
        programs = workload.programs(draft_length, pair)
    coldest = dataclasses.replace(workload.sampling, temperature=0.0)
    greedy, decoded = greedy_of(pair, programs, workload.batches, coldest)
    laws = laws_of(workload, pair, law_prompts(workload.prompts, decoded), draft_length)
    return speculative_report.write_exactness(job, greedy, laws)


def greedy_of(
    pair: Pair, programs: Programs, batches: Sequence[Prompts], coldest: SamplingParams
) -> tuple[greedy_check.Greedy, Outcome]:
    """Greedy decoding plainly and by speculation, by the programs that are timed; and the first batch, decoded."""
    plain, speculative = (program.run(batches, coldest, 0) for program in programs)
    checks = []
    for batch, want, got in zip(batches, plain, speculative, strict=True):
        if (np.asarray(want.lengths) == batch.lengths).any():
            raise fail("target", "finite logits after every prompt", "none: its weights hold NaN or overflow")
        checks.append(greedy_check.check_greedy(pair, got.tokens, want.tokens, batch.lengths, got.lengths))
    return greedy_check.worst_of(checks), plain[0]


def law_prompts(prompts: Prompts, decoded: Outcome) -> Prompts:
    """The prompts, or where all are too short for enough prefixes, those of one batch as decoding continued them."""
    if prompts.lengths.max() >= law_check.LONGEST_PREFIX:
        return prompts
    return Prompts(np.asarray(decoded.tokens), np.asarray(decoded.lengths))


def laws_of(workload: Workload, pair: Pair, prompts: Prompts, draft_length: int) -> list[law_check.Law]:
    """Sampled first tokens at prefixes of the prompts, against the target's probabilities."""
    job, on_cpu = workload.job, jax.default_backend() == "cpu"
    rows = 1024 if on_cpu else 8192
    plan = law_check.LawPlan(
        rows=rows,
        dispatches=-(-job.args.law_draws // rows),
        simulations=10_000 if job.smoke else 1_000_000,
        seed=job.seed,
    )
    # The first token's law does not depend on the drafts after the first, and a CPU need not pay for them.
    drafts = 1 if on_cpu else draft_length
    with job.console.status(f"drawing {PREFIXES * plan.draws:,} tokens"):
        return law_check.measure_laws(pair, *prompts, PREFIXES, drafts, job.args.rule, workload.sampling, plan)
