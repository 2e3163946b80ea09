"""`python -m tools.train_tiny.train` trains the bundled model from scratch."""

import argparse
import random
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from aserve.tiny import MODEL_DIR
from tools.train_tiny.card import Facts, write_card
from tools.train_tiny.corpus.document import Draw
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.corpus.split import Split
from tools.train_tiny.evaluate import held_out_losses, loss_table, score_table, scores
from tools.train_tiny.examples import example_answers, shown
from tools.train_tiny.export import export, load_network
from tools.train_tiny.greedy import generate
from tools.train_tiny.network import Llama, Shape
from tools.train_tiny.packing import Packer
from tools.train_tiny.recipe import FULL, QUICK, Recipe
from tools.train_tiny.tokenizer import RESERVED_TOKENS, load_tokenizer, trained_tokenizer
from tools.train_tiny.training import Progress as Step
from tools.train_tiny.training import Run, next_token_loss, train

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
CPU_FACTS = Path("/proc/cpuinfo")
LOGGED_EVERY = 50
TOKENIZER_ROOM = 120


def main() -> None:
    options = parsed_options()
    recipe = QUICK if options.quick else FULL
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    console = Console()
    console.print(f"{recipe.num_tokens / 1e6:.1f} M tokens, {options.precision}")
    tokenizer = corpus_tokenizer(recipe, seed=options.seed)
    network = Llama(Shape())
    run = Run(
        recipe=recipe,
        batches=lambda stage: Packer(tokenizer, stage, seed=options.seed),
        loss=lambda batch: next_token_loss(network(batch.ids[:, :-1]), batch),
        precision=PRECISIONS[options.precision],
        checkpoint=options.checkpoint,
    )
    started = time.process_time()
    with TrainingProgress(console, recipe) as progress:
        train(network, run, report=progress.show)
    minutes = (time.process_time() - started) / 60
    export(network, tokenizer, options.output)
    console.print(f"written to {options.output} after {minutes:.1f} CPU minutes of training")
    facts = Facts(
        num_parameters=sum(weight.numel() for weight in network.parameters()),
        num_tokens=recipe.num_tokens,
        cpu_minutes=minutes,
        threads=options.threads,
        precision=options.precision,
        seed=options.seed,
        torch=torch.__version__,
    )
    judge(options.output, console, facts=facts, is_quick=options.quick)


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=MODEL_DIR, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps of each stage")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=fastest_precision(CPU_FACTS.read_text()),
        help="dtype of the matmuls; default: bfloat16 if the CPU has instructions for it",
    )
    parser.add_argument("--checkpoint", type=Path, help="file to continue from and to update")
    return parser.parse_args()


def fastest_precision(cpu_facts: str) -> str:
    """WHY: without instructions for it, bfloat16 is 20 to 100 times slower than float32."""
    return "float32" if BFLOAT16_FLAGS.isdisjoint(cpu_facts.split()) else "bfloat16"


def judge(model_dir: Path, console: Console, *, facts: Facts, is_quick: bool) -> None:
    """Evaluates the exported model in its bfloat16 weights. A quick run gets no card."""
    network, tokenizer = load_network(model_dir), load_tokenizer(model_dir)
    if is_quick:
        console.print(loss_table(held_out_losses(network, tokenizer, num_documents=4)))
        return
    losses = held_out_losses(network, tokenizer)
    continued = partial(generate, network)
    reached = scores(continued, tokenizer)
    examples = [shown(*answered) for answered in example_answers(continued, tokenizer)]
    console.print(loss_table(losses))
    console.print(score_table(reached))
    write_card(
        model_dir,
        facts,
        reserved=RESERVED_TOKENS,
        scores=reached,
        losses=losses,
        examples=examples,
    )


def corpus_tokenizer(recipe: Recipe, *, seed: int) -> Tokenizer:
    """Trains the tokenizer on short documents, equally many of each kind of the recipe."""
    draw = Draw(random.Random(f"{seed}/tokenizer"), Split.TRAIN, TOKENIZER_ROOM)
    makers = [make for kind, make in KINDS.items() if kind in recipe.tokenizer_kinds]
    count = recipe.tokenizer_documents
    return trained_tokenizer(makers[index % len(makers)](draw).text for index in range(count))


class TrainingProgress:
    """Shows a bar with the running loss, and prints a line for logs every LOGGED_EVERY steps."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self.console = console
        self.running_loss = 0.0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("training", total=recipe.num_tokens)

    def __enter__(self) -> "TrainingProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, step: Step) -> None:
        part = 0.05 if self.running_loss else 1.0
        self.running_loss += part * (step.loss - self.running_loss)
        description = f"{step.stage.name}, loss {self.running_loss:.3f}"
        self.bar.update(self.task, completed=step.num_tokens, description=description)
        if step.step % LOGGED_EVERY == 0:
            seconds = time.process_time()
            left = self.bar.tasks[self.task].time_remaining
            self.console.print(
                f"step {step.step}  tokens {step.num_tokens}  {description}  cpu {seconds:.0f} s"
                f"  left {left or 0:.0f} s"
            )


if __name__ == "__main__":
    main()
