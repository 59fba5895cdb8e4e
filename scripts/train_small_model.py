"""Train the small model that the repository carries (models/manta-small).

All text comes from one place: the running interpreter's standard library. The script trains a
byte-level BPE tokenizer on it, then a Llama of about 5 M parameters, and writes
a folder that transformers and the engine load. Data order, initial weights and questions are
seeded; the losses still depend on the Python patch version and on the floating-point library.

    python scripts/train_small_model.py                 # the run behind the committed weights
    python scripts/train_small_model.py --resume        # go on after an interruption
    python scripts/train_small_model.py --export-only   # write --out from the last checkpoint

Matrices are trained with Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers"),
embeddings and norms with AdamW.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from small_model_corpus import END, QUESTIONS, Corpus, collect_corpus, cut, epoch_documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("train_small_model")

VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
HELD_OUT_TOKENS = 8 * 4096 + 1
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL_TOKENS = (BOS, EOS, "<|user|>", "<|assistant|>", "<|system|>", END)
# The split of Llama 3, with at most two digits a piece because the vocabulary is small.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = Path(__file__).parents[1] / "models" / "manta-small" / "chat_template.jinja"


def train_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text round-trips because all 256 bytes are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Prose twice: English words should win merges against indentation and operators.
    chats = [
        f"{question.format(name=pair.name)}\n{pair.answer}"
        for pair in corpus.pairs
        for question in QUESTIONS[pair.kind][:2]
    ]
    tokenizer.train_from_iterator(corpus.files + 2 * corpus.prose + chats, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def token_stream(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: str, min_tokens: int
) -> npt.NDArray[np.uint16]:
    """Tokens of whole epochs, at least one, until there are ``min_tokens``."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    chunks: list[npt.NDArray[np.uint16]] = []
    total = epoch = 0
    while not chunks or total < min_tokens:
        rng = random.Random(f"{seed}:{epoch}")
        pieces = [cut(text, rng) for text in epoch_documents(corpus, rng)]
        flat = [piece for document in pieces for piece in document]
        encoded = iter(tokenizer(flat, add_special_tokens=False)["input_ids"])
        ids: list[int] = []
        for document in pieces:
            ids.append(bos)
            for _ in document:
                ids += next(encoded)
            ids.append(eos)
        chunks.append(np.array(ids, dtype=np.uint16))
        total += len(ids)
        epoch += 1
    log.info("%s: %d epochs, %d tokens", seed, epoch, total)
    return np.concatenate(chunks)


class TrainingData(NamedTuple):
    """A tokenizer and the two token streams made with it, each ``[num_tokens]``."""

    tokenizer: PreTrainedTokenizerFast
    train: npt.NDArray[np.uint16]
    held_out: npt.NDArray[np.uint16]


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix update is orthogonalized by five Newton-Schulz steps.

    Own float32 version: torch.optim.Muon iterates in bfloat16, which is slow on CPUs without it.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        lr: float,
        weight_decay: float,
        executor: ThreadPoolExecutor,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self.executor = executor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            nesterov: list[torch.Tensor] = []
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                nesterov.append(p.grad.lerp(state["momentum"], group["momentum"]))
            updates = self.executor.map(orthogonalize, nesterov)
            for p, update in zip(group["params"], updates, strict=True):
                scale = max(1.0, p.size(0) / p.size(1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)


@torch.no_grad()
def orthogonalize(g: torch.Tensor) -> torch.Tensor:
    """Nearest semi-orthogonal matrix, roughly: the quintic iteration of Muon."""
    x = g.T if g.size(0) > g.size(1) else g
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.size(0) > g.size(1) else x


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, window: npt.NDArray[np.uint16]) -> torch.Tensor:
    """Mean cross entropy (nats per token) of one row, ``[length + 1]`` tokens."""
    ids = torch.from_numpy(window.astype(np.int64))
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0], ids[1:])


def rows_of(tokens: npt.NDArray[np.uint16], length: int) -> list[npt.NDArray[np.uint16]]:
    """``[n * length + 1]`` tokens as n rows of length + 1, each overlapping the next by one."""
    return [tokens[start : start + length + 1] for start in range(0, len(tokens) - length, length)]


def accumulate_gradients(
    model: LlamaForCausalLM, rows: list[npt.NDArray[np.uint16]], executor: ThreadPoolExecutor
) -> float:
    """Set the gradients of the mean loss over ``rows``; returns that loss.

    Each row is one task for a single-threaded worker. To split every operation over the cores
    would mean to wait at a barrier hundreds of times a step, which is slow on a busy machine. The
    sum runs in row order, so the result does not depend on which worker was faster.
    """
    parameters = list(model.parameters())

    def row_gradients(row: npt.NDArray[np.uint16]) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = loss_of(model, row)
        return loss.item(), torch.autograd.grad(loss / len(rows), parameters)

    total = 0.0
    for loss, gradients in executor.map(row_gradients, rows):
        total += loss / len(rows)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
    return total


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: npt.NDArray[np.uint16], length: int) -> float:
    rows = rows_of(tokens, length)
    return sum(loss_of(model, row).item() for row in rows) / len(rows)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write config, bfloat16 weights, tokenizer and generation settings."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(weights)
    copy.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    copy.save_pretrained(out)
    # CPUs with bfloat16 instructions must give the same tokens as those without.
    copy.config.dtype = torch.float32
    copy.config.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    log.info("exported to %s", out)


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm-up, a constant stage, and a cosine to almost zero over the last 60 % of the steps.

    Before the cosine the run does not depend on ``steps``, so ``--resume`` may change them.
    """
    warmup = min(1.0, (step + 1) / 40)
    progress = max(0.0, (step / steps - 0.4) / 0.6)
    return warmup * (0.01 + 0.495 * (1 + math.cos(math.pi * progress)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train models/manta-small from the stdlib.")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps in all")
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, help="tokens per step, a multiple of 2048"
    )
    parser.add_argument("--threads", type=int, default=2, help="worker threads")
    parser.add_argument("--seed", type=int, default=20, help="seed of weights and data order")
    parser.add_argument("--out", type=Path, default=Path("models/manta-small"))
    parser.add_argument("--work-dir", type=Path, default=Path("build/train_small_model"))
    parser.add_argument("--checkpoint-steps", type=int, default=100)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--export-only", action="store_true", help="write --out and stop")
    args = parser.parse_args()
    if args.batch_tokens <= 0 or args.batch_tokens % 2048:
        parser.error(f"--batch-tokens must be a positive multiple of 2048, not {args.batch_tokens}")
    return args


def prepare_data(work_dir: Path, seed: int, min_tokens: int, reuse: bool) -> TrainingData:
    """Tokenizer and token streams; kept in ``work_dir``, so that resuming sees the same data."""
    paths = [work_dir / name for name in ("tokenizer", "train.npy", "held_out.npy")]
    if reuse and all(path.exists() for path in paths):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(paths[0], local_files_only=True)
        data = TrainingData(tokenizer, np.load(paths[1]), np.load(paths[2]))
        if len(data.train) >= min_tokens:
            return data
    corpus, held_out = collect_corpus()
    tokenizer = train_tokenizer(corpus)
    data = TrainingData(
        tokenizer,
        token_stream(corpus, tokenizer, str(seed), min_tokens),
        token_stream(held_out, tokenizer, "held-out", 1)[:HELD_OUT_TOKENS],
    )
    tokenizer.save_pretrained(paths[0])
    np.save(paths[1], data.train)
    np.save(paths[2], data.held_out)
    return data


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    executor = ThreadPoolExecutor(args.threads, initializer=torch.set_num_threads, initargs=(1,))
    torch.manual_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work_dir / "checkpoint.pt"

    data = prepare_data(
        args.work_dir,
        args.seed,
        args.steps * args.batch_tokens + 1,
        reuse=args.resume or args.export_only,
    )
    tokenizer = data.tokenizer
    model = build_model(tokenizer)
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    outer = [p for p in model.parameters() if not any(p is q for q in inner)]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(inner, lr=0.02, weight_decay=0.05, executor=executor),
        torch.optim.AdamW(outer, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first_step = 0
    if args.resume or args.export_only:
        state = torch.load(checkpoint)
        first_step = state["step"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    if args.export_only:
        export(model, tokenizer, args.out)
        return

    log.info("parameters: %d", sum(p.numel() for p in model.parameters()))
    long_from = int(0.9 * args.steps)
    started, running = time.monotonic(), []
    for step in range(first_step, args.steps):
        factor = learning_rate_factor(step, args.steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
        start = step * args.batch_tokens
        # The last tenth is trained on long rows, so that contexts of 2048 tokens work.
        length = 2048 if step >= long_from else 512
        rows = rows_of(data.train[start : start + args.batch_tokens + 1], length)
        running.append(accumulate_gradients(model, rows, executor))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if done % 20 == 0 or done == args.steps:
            speed = (done - first_step) * args.batch_tokens / (time.monotonic() - started)
            mean = sum(running) / len(running)
            log.info("step %d train_loss %.4f tokens_per_s %.0f", done, mean, speed)
            running.clear()
        if done % 200 == 0 or done == args.steps:
            losses = [held_out_loss(model, data.held_out, n) for n in (512, 2048)]
            log.info("step %d held_out_512 %.4f held_out_2048 %.4f", done, *losses)
        if done % args.checkpoint_steps == 0 or done == args.steps:
            state = {
                "step": done,
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    export(model, tokenizer, args.out)
    settings = {key: str(value) for key, value in vars(args).items()}
    log.info("settings %s", json.dumps(settings))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(parse_args())
