"""Continue a prompt or answer it, as text that streams, with a summary of how fast it came."""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from experiments import chat, pairs
from experiments.greedy_check import full_logits
from experiments.harness import Job
from flashspec import models
from flashspec.checks import at_least, fail
from flashspec.generate import Chunk, generate_stream
from flashspec.measure import HOST
from flashspec.sampling import SamplingParams, probabilities

QUESTION = "What does a model write, and how fast, with a draft or without?"
NEEDS = "nothing beyond the installation; checkpoints of your own with --model and --draft"
TIME = "half a minute on 2 CPU cores for the bundled pair"

PROMPT = "def fibonacci(n):\n    "
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
# Prompts are padded to a multiple of this, so that one program serves many of them.
PROMPT_STEP = 32
SMOKE_LAYERS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a checkpoint directory (default: the bundled pair)")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--draft", help="a checkpoint directory, or 'ngram' (default: none for a model of your own)")
    drafts.add_argument("--draft-layers", type=int, metavar="L", help="draft with the model's own first L layers")
    drafts.add_argument("--plain", action="store_true", help="no draft")
    parser.add_argument("--prompt", help="the text to continue, or the question to answer (default: a line of code)")
    parser.add_argument("--system", help="instructions ahead of the prompt, where the chat template knows them")
    parser.add_argument("--no-chat", action="store_true", help="continue the bare text, whatever the template")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--draft-length", type=int, default=4, help="draft tokens a round (default: 4)")
    parser.add_argument("--rule", choices=("chain", "match"), default="chain", help="of verification (default: chain)")
    parser.add_argument("--temperature", type=float, default=0.8, help="default: 0.8")
    parser.add_argument("--top-k", type=int, default=0, help="default: 0, which keeps all")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: 1, which keeps all")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, bfloat16 elsewhere")
    parser.add_argument("--devices", type=int, default=1, help="split the model over so many devices (default: 1)")


@dataclasses.dataclass(frozen=True)
class Request:
    """What is generated from: the pair of models, the prompt's tokens [1,P] and length [1], settings."""

    pair: pairs.Pair
    tokens: np.ndarray
    lengths: np.ndarray
    stops: tuple[int, ...]
    sampling: SamplingParams
    options: dict[str, Any]

    def stream(self, seed: int) -> Iterator[Chunk]:
        """The tokens as they come, one round at a time."""
        pair = self.pair
        return generate_stream(
            jax.random.key(seed),
            pair.target,
            pair.target_params,
            self.tokens,
            self.lengths,
            rounds=1,
            drafter=pair.drafter,
            sampling=self.sampling,
            stop_tokens=self.stops,
            **self.options,
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came.

    Attributes:
      tokens: ids, a stop token included.
      logprobs: theirs under the model.
      rounds: how many the answer took.
      ttft_s: seconds from the call to the first round's tokens, prefill of both models included.
      total_s: seconds to the last token.
    """

    tokens: list[int]
    logprobs: list[float]
    rounds: int
    ttft_s: float
    total_s: float


def run(job: Job) -> None:
    """Load, compile, stream the answer, check it, and say how fast it came."""
    start = time.perf_counter()
    request = read_request(job)
    loaded = time.perf_counter()
    with job.console.status("compiling"):
        for _, _ in zip(request.stream(job.seed), range(2), strict=False):
            pass  # the prefill's program and the rounds'
    compiled = time.perf_counter()
    answer = write(job, request)
    what, difference, bound = check(request, answer)
    if job.claim(f"{what}: apart by {difference:.1e} at most, {bound:.1e} allowed", difference <= bound):
        summarise(job, request, answer, loaded - start, compiled - loaded)
    else:
        job.say("A wrong result has no speed.")


def read_request(job: Job) -> Request:
    """Check the options, load the models, encode the prompt."""
    args = job.args
    for name in ("max_new_tokens", "draft_length", "devices"):
        at_least(name.replace("_", "-"), getattr(args, name), 1)
    if args.prompt is not None and not args.prompt:
        raise fail("prompt", "a text that is not empty", "''")
    if job.smoke:
        vars(args).update(max_new_tokens=min(args.max_new_tokens, 24))
    sampling = SamplingParams(args.temperature, args.top_k or None, None if args.top_p == 1 else args.top_p)
    sampling.check(1, 1)
    pair, directory = load(job)
    template = None if args.no_chat else chat.read_template(directory)
    text = args.prompt or PROMPT
    if template is not None:
        text = chat.render(template, directory, text, args.system)
    elif args.system is not None:
        raise fail("system", "a checkpoint with a chat template, and no --no-chat", args.system)
    tokens, lengths = pair.tokenizer.encode([text], special_tokens=template is None)
    if not lengths[0]:
        raise fail("prompt", "at least one token", repr(text))
    tokens = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % PROMPT_STEP)))
    options = {"draft_length": args.draft_length, "max_new_tokens": args.max_new_tokens, "rule": args.rule}
    stops = chat.stop_tokens(directory, pair.config.eos_token_ids)
    return Request(pair, tokens, lengths, stops, sampling, options if pair.drafter else options | {"rule": "chain"})


def load(job: Job) -> tuple[pairs.Pair, Path]:
    """The models that are asked for, with a progress bar, and where the target lies."""
    args, bundled = job.args, job.args.model is None
    directory = pairs.FOLDER / "target" if bundled else args.model
    dtype = DTYPES[args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")]
    mesh = None if args.devices == 1 else models.decoder_mesh(1, args.devices)
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.DownloadColumn())
    with rich.progress.Progress(*columns, console=job.console) as bar:
        task = bar.add_task(f"loading {directory}", total=None)
        checkpoint = pairs.load_checkpoint(
            "model", directory, dtype, mesh=mesh, progress=lambda done, all: bar.update(task, completed=done, total=all)
        )
    if checkpoint.tokenizer is None:
        raise fail("model", "a directory with a tokenizer.json", directory)
    config, params = checkpoint.config, checkpoint.params
    draft = args.draft or (str(pairs.FOLDER / "draft") if bundled and not args.plain else None)
    if args.draft_layers is not None:
        draft = f"{pairs.LAYERS}{args.draft_layers}"
    drafter = None if draft is None else pairs.make_drafter(draft, checkpoint, dtype)
    if job.smoke and bundled:
        config, params = models.shallow(config, params, SMOKE_LAYERS)
    model = models.as_language_model(config, dtype, mesh=mesh)
    return pairs.Pair(config, model, params, drafter, checkpoint.tokenizer, dtype), directory


def write(job: Job, request: Request) -> Answer:
    """Print the answer while it comes."""
    decode, tokens, logprobs, shown, text = request.pair.tokenizer.decode, [], [], "", ""
    rounds, start, first = 0, time.perf_counter(), 0.0
    job.console.rule("answer")
    for chunk in request.stream(job.seed):
        count, rounds = int(chunk.counts[0]), rounds + 1
        tokens += np.asarray(chunk.tokens)[0, :count].tolist()
        logprobs += np.asarray(chunk.logprobs)[0, :count].tolist()
        first = first or time.perf_counter()
        text = decode(np.array([tokens]))[0]
        # A character whose bytes have not all come yet ends the text as replacement marks; it is shown with its last.
        if text.startswith(shown) and not text.endswith("\ufffd"):
            job.console.out(text.removeprefix(shown), end="", highlight=False)
            shown = text
    total = time.perf_counter() - start
    job.console.out(text.removeprefix(shown), highlight=False)
    job.console.rule()
    job.report["text"] = text
    if not tokens:
        raise fail("model", "finite logits after the prompt", "none: its weights hold NaN, or overflow in this dtype")
    return Answer(tokens, logprobs, rounds, first - start, total)


def check(request: Request, answer: Answer) -> tuple[str, float, float]:
    """What one forward without a cache says of the answer in words, how far it is from it, and how far it may be.

    Streamed log-probabilities are compared; at temperature 0, where they are all 0, each token's logit with its row's
    maximum.
    """
    prompt = request.tokens[0, : request.lengths[0]].tolist()
    row = np.array([prompt + answer.tokens], np.int32)
    logits = full_logits(request.pair.target, request.pair.target_params, jnp.asarray(row))[:, len(prompt) - 1 : -1]
    new = np.array(answer.tokens)
    largest = float(np.abs(np.asarray(logits)).max())
    eps = float(jnp.finfo(request.pair.dtype).eps)
    temperature = float(np.asarray(request.sampling.temperature))
    if temperature == 0:
        plain = np.asarray(logits)[0]
        gap = float((plain.max(1) - plain[np.arange(len(new)), new]).max())
        return "every token is the most probable by one forward over the whole text", gap, 256 * eps * largest
    low, high = _log_probabilities(logits, new, request.sampling)
    streamed = np.array(answer.logprobs)
    apart = float(np.maximum(low - streamed, streamed - high).max())
    # A change of every logit by delta moves a log-probability by 2 delta / temperature at most.
    what = "every token's log-probability is that of one forward over the whole text"
    return what, max(apart, 0.0), 2 / temperature * 64 * eps * largest


def _log_probabilities(
    logits: jax.Array, tokens: np.ndarray, sampling: SamplingParams
) -> tuple[np.ndarray, np.ndarray]:
    """The least and largest log-probability [T] that tokens [T] may have under logits [1,T,V].

    They are one number, unless top-k or top-p cut the distribution: rounding may move one token across the cut, and the
    mass that is left is then another.
    """
    everything = dataclasses.replace(sampling, top_k=None, top_p=None)
    whole, cut = (np.asarray(probabilities(logits, each)[0])[0].astype(np.float64) for each in (everything, sampling))
    own = np.log(np.maximum(whole[np.arange(len(tokens)), tokens], 1e-300))
    if sampling.top_k is None and sampling.top_p is None:
        return own, own
    kept = np.where(cut > 0, whole, 0.0)
    least = np.where(cut > 0, whole, 1.0).min(axis=1)
    return own, own - np.log(np.maximum(kept.sum(axis=1) - least, whole.max(axis=1)))


def summarise(job: Job, request: Request, answer: Answer, load_s: float, compile_s: float) -> None:
    """The line that ends a run, and its record."""
    count, per_round = len(answer.tokens), len(answer.tokens) / answer.rounds
    job.say(
        f"{count} tokens, {count / answer.total_s:.1f} tokens/s, time to first token {1e3 * answer.ttft_s:.1f} ms "
        f"(streaming path), {per_round:.2f} tokens per round; loaded in {load_s:.1f} s, compiled in {compile_s:.1f} s"
    )
    job.record(
        "generate",
        settings={
            **request.options,
            "prompt_tokens": int(request.lengths[0]),
            "drafter": type(request.pair.drafter).__name__,
        },
        clock=HOST,
        check="log-probabilities against one forward",
        ttft_s=answer.ttft_s,
        ttft_method="stream",
        values={
            "tokens": count,
            "rounds": answer.rounds,
            "tokens_per_round": per_round,
            "total_s": answer.total_s,
            "load_s": load_s,
            "prefill_and_compile_s": compile_s,
        },
    )
