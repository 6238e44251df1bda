"""Trains the pair of models that ships with the repository: a target, and a draft distilled from it."""

import argparse
import dataclasses
import functools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import corpus, pair_metrics
from experiments.harness import Job
from experiments.training import Point, Recipe, train
from flashspec import models
from flashspec.cache import dense_cache
from flashspec.cache.dense import DenseCache

QUESTION = (
    "How well does a small draft, distilled from a small target, speculate for it on the standard library's source?"
)
NEEDS = "a GPU (an H200 has been used); the standard library's source files of the Python that runs it"
TIME = "8 minutes on an H200"

TEMPERATURE = 0.8
DRAFT_LENGTH = 4
PROMPTS = 8
MAX_PAIR_BYTES = 12_000_000

TARGET_SIZES = "hidden=192,layers=12,mlp=448,heads=4,kv_heads=2,head_dim=64"
DRAFT_SIZES = "hidden=128,layers=2,mlp=384,heads=2,kv_heads=1,head_dim=64"
SMOKE = {
    "vocab_size": 320,
    "target_sizes": "hidden=32,layers=1,mlp=64,heads=2,kv_heads=1,head_dim=16",
    "draft_sizes": "hidden=32,layers=1,mlp=64,heads=2,kv_heads=1,head_dim=16",
    "context": 64,
    "batch": 4,
    "minutes": 0.1,
    "max_steps": 20,
    "sample_tokens": 2048,
    "corpus_bytes": 500_000,
    "held_out": 0.2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=7.0, help="for all training, compilation included")
    parser.add_argument("--corpus", type=Path, help="a folder of Python sources (default: this Python's library)")
    parser.add_argument("--no-tests", action="store_true", help="leave out the library's own tests")
    parser.add_argument("--corpus-bytes", type=int, help="use only so much text")
    parser.add_argument(
        "--held-out", type=float, default=0.06, help="share of files kept from training, half to validate"
    )
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--target-sizes", default=TARGET_SIZES, help=f"default: {TARGET_SIZES}")
    parser.add_argument("--draft-sizes", default=DRAFT_SIZES, help=f"default: {DRAFT_SIZES}")
    parser.add_argument("--target", type=Path, help="distil from this checkpoint and do not train a target")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--epochs", type=float, default=30.0, help="of the target over the corpus, at most")
    parser.add_argument("--max-steps", type=int, default=40_000, help="of either model")
    parser.add_argument("--target-rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--draft-rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.1, help="in the target's training")
    parser.add_argument("--draft-share", type=float, default=0.65, help="of the time, for the draft")
    parser.add_argument("--sample-tokens", type=int, default=12_000_000, help="from the target, to distil on")
    parser.add_argument("--attention", choices=("xla", "cudnn"), default="xla", help="of jax.nn, in training")


def run(job: Job) -> None:
    args = job.args
    if job.smoke:
        vars(args).update(SMOKE)
    attention = functools.partial(jax.nn.dot_product_attention, implementation=args.attention)
    texts = corpus.load_corpus(
        args.corpus or corpus.library_folder(), not args.no_tests, args.held_out, args.corpus_bytes
    )
    tokenizer = _tokenizer(job, texts)
    streams = {
        field.name: corpus.token_stream(tokenizer.backend, getattr(texts, field.name))
        for field in dataclasses.fields(texts)
    }
    sizes = {name: sum(len(document.text.encode()) for document in getattr(texts, name)) for name in streams}
    files = {name: len(getattr(texts, name)) for name in streams}
    job.say(
        f"corpus: {files['train']} files to learn from, {sizes['train'] / 1e6:.1f} MB, {len(streams['train'])} tokens; "
        f"{files['validation']} for validation, {files['held_out']} held out; {tokenizer.size} token ids"
    )
    trainer = Trainer(job, attention, streams)
    target = trainer.target()
    samples = trainer.sample(target, streams["train"], args.sample_tokens)
    draft = trainer.draft(target, samples)
    scores = _evaluate(job, trainer, target, draft, sizes["held_out"] / len(streams["held_out"]))
    _export(job, texts, tokenizer, target, draft, scores)


def _tokenizer(job: Job, texts: corpus.Corpus) -> models.Tokenizer:
    if job.args.target:
        return models.Tokenizer.load(job.args.target / "tokenizer.json")
    return models.Tokenizer(corpus.train_tokenizer(texts.train, job.args.vocab_size))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with its float32 parameters as the checkpoint will hold them, and how it was trained."""

    config: models.DecoderConfig
    params: nnx.State
    curve: list[Point]


@dataclasses.dataclass
class Trainer:
    """The three stages that need the device: train the target, sample from it, distil the draft."""

    job: Job
    attention: Callable[..., jax.Array]
    streams: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        length = self.job.args.context + 1
        self.validation = pair_metrics.windows_of(self.streams["validation"], length, 128)
        self.held_out = pair_metrics.windows_of(self.streams["held_out"], length, 256)
        self.key = jax.random.key(self.job.seed)

    def target(self) -> Trained:
        """The larger model, trained on the corpus or read from `--target`."""
        args = self.job.args
        if args.target:
            checkpoint = models.load(args.target, dtype=jnp.float32)
            return Trained(checkpoint.config, checkpoint.params, [])
        config = _config(args.target_sizes, args.vocab_size, args.context)
        steps = int(args.epochs * len(self.streams["train"]) / (args.batch * args.context))
        recipe = self._recipe(args.target_rate, min(args.max_steps, steps), args.minutes * (1 - args.draft_share))
        loss = pair_metrics.target_loss(config, self.attention, args.dropout)
        validate = pair_metrics.mean_loss(config, self.validation, self.attention)
        return self._train("target", config, loss, None, self.streams["train"], recipe, validate)

    def draft(self, target: Trained, samples: np.ndarray) -> Trained:
        """The smaller model, distilled on the corpus and on what the target writes."""
        args = self.job.args
        config = _config(args.draft_sizes, target.config.vocab_size, args.context)
        recipe = self._recipe(args.draft_rate, args.max_steps, args.minutes * args.draft_share)
        loss = pair_metrics.draft_loss(config, target.config, self.attention, TEMPERATURE)
        validate = pair_metrics.mean_loss(config, self.validation, self.attention)
        stream = np.concatenate([self.streams["train"], samples.reshape(-1)])
        return self._train("draft", config, loss, target.params, stream, recipe, validate)

    def _recipe(self, rate: float, max_steps: int, minutes: float) -> Recipe:
        args = self.job.args
        per_call = 10 if self.job.smoke else 50
        return Recipe(args.batch, args.context, rate, 0.1, max_steps, minutes, per_call)

    def _train(
        self,
        name: str,
        config: models.DecoderConfig,
        loss: Callable[..., jax.Array],
        context: Any,
        stream: np.ndarray,
        recipe: Recipe,
        validate: Callable[[Any], float],
    ) -> Trained:
        self.job.say(f"{name}: {config.num_parameters / 1e6:.2f} M parameters, {recipe.max_steps} steps at most")
        init_key, train_key = jax.random.split(jax.random.fold_in(self.key, len(name)))
        params = nnx.state(models.Decoder(config, rngs=nnx.Rngs(init_key)), nnx.Param)
        params, curve = train(
            loss,
            params,
            context,
            jnp.asarray(stream.astype(np.uint16)),
            recipe,
            train_key,
            validate=validate,
            report=lambda line: self.job.say(f"{name}: {line}"),
        )
        # What is judged is what is stored.
        stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
        return Trained(config, stored, curve)

    def sample(self, target: Trained, stream: np.ndarray, tokens: int) -> np.ndarray:
        """About so many tokens that the target writes after pieces of a stream: [rows, context + 1]."""
        length = self.job.args.context + 1
        started, rows = time.monotonic(), max(tokens // length, 1)
        per_call = min(rows, 1024)
        prompts = pair_metrics.windows_of(stream, length // 8, -(-rows // per_call) * per_call)
        prompts = np.resize(prompts, (-(-rows // per_call) * per_call, length // 8))
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)
        parts = [
            np.asarray(
                sample_rows(
                    params,
                    jax.random.fold_in(self.key, start),
                    prompts[start : start + per_call],
                    config=target.config,
                    length=length,
                )
            )
            for start in range(0, len(prompts), per_call)
        ]
        samples = np.concatenate(parts)
        self.job.say(f"sampled {samples.size} tokens from the target in {time.monotonic() - started:.1f} s")
        return samples


@functools.partial(jax.jit, static_argnames=("config", "length"))
def sample_rows(
    params: nnx.State, key: jax.Array, prompts: jax.Array, *, config: models.DecoderConfig, length: int
) -> jax.Array:
    """Continue prompts [rows, P] to [rows, length] at the pair's temperature, all rows in step."""
    rows, given = prompts.shape
    cache = dense_cache(config.num_layers, rows, length, config.num_kv_heads, config.head_dim, dtype=jnp.bfloat16)
    prompts = jnp.pad(prompts.astype(jnp.int32), ((0, 0), (0, length - given)))

    def attention(query: jax.Array, view: Any, **_: Any) -> jax.Array:
        return jax.nn.dot_product_attention(query, view.key, view.value, key_value_seq_lengths=view.length)

    def step(carry: tuple[DenseCache, jax.Array], index: jax.Array) -> tuple[tuple[DenseCache, jax.Array], jax.Array]:
        cache, token = carry
        decoder = models.merge(config, params)
        hidden, cache = decoder.step(token[:, None], cache, attention=attention)
        logits = decoder.logits(hidden)[:, 0] / TEMPERATURE
        drawn = jax.random.categorical(jax.random.fold_in(key, index), logits)
        following = jnp.where(
            index + 1 < given, prompts[:, jnp.minimum(index + 1, length - 1)], drawn.astype(jnp.int32)
        )
        return (cache, following), following

    _, drawn = jax.lax.scan(step, (cache, prompts[:, 0]), jnp.arange(length - 1, dtype=jnp.int32))
    return jnp.concatenate([prompts[:, :1], drawn.T], axis=1)


def _config(sizes: str, vocab_size: int, context: int) -> models.DecoderConfig:
    """A Llama-shaped configuration from "hidden=192,layers=12,..."."""
    values = {name: int(value) for name, value in (item.split("=") for item in sizes.split(","))}
    return models.DecoderConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=values["hidden"],
        intermediate_size=values["mlp"],
        num_layers=values["layers"],
        num_heads=values["heads"],
        num_kv_heads=values["kv_heads"],
        head_dim=values["head_dim"],
        tie_embeddings=True,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_ids=(0,),
    )


def _evaluate(job: Job, trainer: Trainer, target: Trained, draft: Trained, bytes_per_token: float) -> dict[str, Any]:
    """Losses and acceptance on held-out text, and on what the target writes after pieces of it."""
    attention = trainer.attention

    def score(windows: np.ndarray) -> pair_metrics.PairScores:
        return pair_metrics.score_pair(
            target.config, target.params, draft.config, draft.params, windows, attention, TEMPERATURE
        )

    text = score(trainer.held_out)
    written = score(trainer.sample(target, trainer.streams["held_out"], trainer.held_out.size))
    given = job.args.context // 8
    survival = pair_metrics.survival(written.ratio[:, given:], DRAFT_LENGTH)
    survival_on_text = pair_metrics.survival(text.overlap, DRAFT_LENGTH)
    scores: dict[str, Any] = {
        "target_loss_nats": float(text.target_loss.mean()),
        "draft_loss_nats": float(text.draft_loss.mean()),
        "target_bits_per_byte": float(text.target_loss.mean()) / np.log(2) / bytes_per_token,
        "draft_bits_per_byte": float(text.draft_loss.mean()) / np.log(2) / bytes_per_token,
        "acceptance_on_text": float(text.overlap.mean()),
        "acceptance_on_samples": float(written.overlap[:, given:].mean()),
        "survival_on_samples": survival,
        "tokens_per_round": 1 + sum(survival),
        "tokens_per_round_on_text": 1 + sum(survival_on_text),
    }
    rows = [
        [name.replace("_", " "), value if not isinstance(value, list) else " ".join(f"{v:.3f}" for v in value)]
        for name, value in scores.items()
    ]
    job.table(
        "pair",
        f"The pair on held-out text (temperature {TEMPERATURE}, draft length {DRAFT_LENGTH})",
        ["measure", "value"],
        rows,
    )
    with job.figure("curves", "Loss of the next token on validation text") as axes:
        for name, model in (("target", target), ("draft", draft)):
            if model.curve:
                axes.plot([p.step for p in model.curve], [p.validation for p in model.curve], label=name)
        axes.set(xlabel="step", ylabel="nats a token")
        axes.legend()
    job.report["pair"] = scores
    flat = {name: value for name, value in scores.items() if not isinstance(value, list)}
    sizes = {"target": target.config.num_parameters, "draft": draft.config.num_parameters}
    job.record("pair", settings={"temperature": TEMPERATURE, "draft_length": DRAFT_LENGTH} | sizes, values=flat)
    job.report["curves"] = {"target": target.curve, "draft": draft.curve}
    return scores


def _export(
    job: Job,
    texts: corpus.Corpus,
    tokenizer: models.Tokenizer,
    target: Trained,
    draft: Trained,
    scores: dict[str, Any],
) -> None:
    """Write both checkpoints, the prompts and the card below `pair/` in the output folder."""
    folder = job.out / "pair"
    for name, model in (("target", target), ("draft", draft)):
        models.save(folder / name, model.config, model.params, tokenizer, dtype=jnp.bfloat16)
    size = sum(path.stat().st_size for path in folder.glob("*/model.safetensors"))
    prompts = pick_prompts(texts.held_out)
    _write_json(folder / "prompts.json", prompts)
    args = job.args
    card = {
        "what": "A target and a draft distilled from it, for speculative decoding; Llama-shaped, byte-level BPE.",
        "corpus": _origin(args.corpus) + (", its tests left out" if args.no_tests else ""),
        "licence_of_the_corpus": "PSF-2.0",
        "files": {field.name: len(getattr(texts, field.name)) for field in dataclasses.fields(texts)},
        "seed": job.seed,
        "steps": {name: m.curve[-1].step if m.curve else None for name, m in (("target", target), ("draft", draft))},
        "batch": args.batch,
        "context": args.context,
        "parameters": {"target": target.config.num_parameters, "draft": draft.config.num_parameters},
        "bytes": size,
        "device": job.environment.device,
        "date": job.date,
        "held_out": scores,
    }
    _write_json(folder / "card.json", card)
    job.say(f"pair: {size / 1e6:.2f} MB in bfloat16, {len(prompts)} prompts, in {folder}")
    job.claim(f"both models together take at most {MAX_PAIR_BYTES / 1e6:.0f} MB", size <= MAX_PAIR_BYTES)
    job.reaches(
        "the bundled pair",
        f"{scores['tokens_per_round']:.2f} tokens a round at draft length {DRAFT_LENGTH} and temperature {TEMPERATURE}"
        f", after held-out text; {size / 1e6:.1f} MB",
    )
    if not job.smoke:
        job.claim("at least 2.5 tokens a round on held-out prompts", scores["tokens_per_round"] >= 2.5)


def _origin(folder: Path | None) -> str:
    """What the corpus is, for the card."""
    name = f"Python {platform.python_version()}" if folder is None else folder.name
    return f"source files of the standard library of {name}"


def pick_prompts(documents: tuple[corpus.Document, ...]) -> list[dict[str, str]]:
    """Beginnings of held-out files up to a function's signature, library code before tests."""
    found = []
    for document in sorted(documents, key=lambda d: (bool(corpus.TEST_FOLDERS & set(Path(d.name).parts)), d.digest)):
        text = corpus.opening(document.text)
        if text is not None and len(text) >= 120:
            found.append({"file": document.name, "text": text})
    return found[:PROMPTS]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
