"""Train the small English model in `examples/demo_model` on the King James Bible in this folder.

The model is a Llama with two million parameters and grouped-query attention (6 query heads, 2 key/value heads). The
training takes a quarter of an hour on one CPU core. The script downloads nothing.

Muon trains the weight matrices (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/). AdamW trains the
embedding and the norms, because Muon is not designed for these parameters.
"""

from __future__ import annotations

import argparse
import lzma
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).resolve().parent
TEXT = HERE / "king_james_bible.txt.xz"
END_OF_CHAPTER, PAD = "<|end|>", "<|pad|>"
CONTEXT = 256  # number of tokens in a training window, and the maximum length of a text
HELD_OUT_EVERY = 20  # every 20th chapter is used for validation


def read_chapters() -> list[str]:
    """Return the chapters of the text. The file has one verse per line and an empty line between chapters."""
    return lzma.decompress(TEXT.read_bytes()).decode("ascii").strip().split("\n\n")


def train_tokenizer(chapters: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode any prompt.

    Args:
        chapters: training text.
        vocab_size: number of tokens in the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_CHAPTER, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_CHAPTER,
        eos_token=END_OF_CHAPTER,
        pad_token=PAD,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama. With 2 ranks, each rank holds 3 query heads and 1 key/value head."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def encode(chapters: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return all chapters as token ids `[tokens]`, with an end-of-chapter token before each chapter and at the end."""
    ids: list[int] = []
    for chapter in chapters:
        ids += [tokenizer.eos_token_id, *tokenizer.backend_tokenizer.encode(chapter).ids]
    return torch.tensor([*ids, tokenizer.eos_token_id])


def cut(tokens: torch.Tensor) -> torch.Tensor:
    """Cut tokens `[tokens]` into windows `[windows, CONTEXT]`; an incomplete last window is dropped."""
    return tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def windows(tokens: torch.Tensor, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield batches `[batch, CONTEXT]` without end; each epoch shuffles windows with a new offset in the text."""
    while True:
        offset = int(torch.randint(CONTEXT, (1,), generator=generator))
        cuts = cut(tokens[offset:])
        order = torch.randperm(len(cuts), generator=generator)
        yield from (cuts[chosen] for chosen in order.split(batch) if len(chosen) == batch)


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Return the mean cross-entropy of the validation tokens, in nats per token."""
    model.eval()
    cuts = cut(tokens)
    losses = [model(input_ids=chunk, labels=chunk).loss.item() * len(chunk) for chunk in cuts.split(32)]
    model.train()
    return sum(losses) / len(cuts)


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the decoder layers, and AdamW for all other parameters."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    muon_ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in muon_ids]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05, ns_steps=4),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the learning-rate factor: warm-up, plateau, then cosine descent to 2 % over the last 60 % of steps."""
    warm_up, descent = max(1, steps // 50), 0.6
    if step < warm_up:
        return (step + 1) / warm_up
    progress = max(0.0, (step / steps - (1 - descent)) / descent)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def train(
    model: LlamaForCausalLM, train_tokens: torch.Tensor, held_out: torch.Tensor, options: argparse.Namespace
) -> float:
    """Train a model in place, save the model after each best validation loss, and return the best validation loss.

    Args:
        model: model to train.
        train_tokens: training text `[tokens]`.
        held_out: validation text `[tokens]`.
        options: command-line options.
    """
    batches = windows(train_tokens, options.batch, torch.Generator().manual_seed(options.seed))
    optimizers = build_optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
        for optimizer in optimizers
    ]
    best_loss = math.inf
    progress = tqdm(range(1, options.steps + 1), desc="training", unit="step")
    for step in progress:
        batch = next(batches)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        if step % options.eval_every == 0 or step == options.steps:
            held_out_loss = validation_loss(model, held_out)
            progress.set_postfix(train=f"{loss.item():.3f}", held_out=f"{held_out_loss:.3f}")
            if held_out_loss < best_loss:
                best_loss = held_out_loss
                model.save_pretrained(options.out)
    return best_loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=HERE / "demo_model", help="output folder for the model and its tokenizer"
    )
    parser.add_argument("--steps", type=int, default=500, help="number of optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="number of windows per step")
    parser.add_argument("--vocab", type=int, default=2048, help="number of tokens in the vocabulary")
    parser.add_argument("--eval-every", type=int, default=100, help="number of steps between validations")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the order of the windows")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    disable_progress_bar()  # hides the progress bars of saving and loading, inside the training bar

    chapters = read_chapters()
    tokenizer = train_tokenizer(chapters, options.vocab)
    tokenizer.save_pretrained(options.out)
    held_out = encode(chapters[::HELD_OUT_EVERY], tokenizer)
    train_tokens = encode([chapter for i, chapter in enumerate(chapters) if i % HELD_OUT_EVERY], tokenizer)
    model = build_model(tokenizer)
    print(f"{len(chapters)} chapters, {len(train_tokens):,} tokens to train on; {model.num_parameters():,} parameters")

    loss = train(model, train_tokens, held_out, options)
    print(f"held-out loss {loss:.3f} nats per token, perplexity {math.exp(loss):.1f}; stored in {options.out}")

    model = LlamaForCausalLM.from_pretrained(options.out)
    for prompt in ("And it came to pass", "The king"):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        tokens = model.generate(**inputs, max_new_tokens=60, do_sample=True, temperature=0.7)
        print(f"\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
