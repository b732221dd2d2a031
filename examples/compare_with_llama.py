"""Is an architecture of one's own worth it? Train it beside a Llama of the same size, and see what both do.

    pip install 'stackwise[hf,quality,report]'
    python examples/compare_with_llama.py --steps 300

Both learn the same bytes in the same order: the documentation that every CPython carries. Then both are asked
the same of pages that neither has seen: how many bits a byte takes, and which of four endings a passage has.
The table has speed and quality of both, each with its interval, and is written to build/comparison.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from stackwise import ModelSpec, create_simple_rack
from stackwise.benchmark import compare_architectures, llama_baseline
from stackwise.data.text import documentation_pages
from stackwise.data.tokenizer import ByteTokenizer
from stackwise.quality import Tasks, compare_quality, row_task

TOKENIZER = ByteTokenizer(["bos", "eos"])
CONTEXT, ENDING, CHOICES = 96, 24, 4
NEEDED = ("transformers", "lm_eval", "matplotlib")  # for the Llama, the tasks, and the plot at the end


@dataclass
class Settings:
    """How long, how large, and where to."""

    steps: int = 300
    batch_size: int = 8
    seq_len: int = 128
    questions: int = 200
    learning_rate: float = 3e-3
    output: Path = Path("build/comparison")


def own_architecture(seq_len: int) -> nn.Module:
    """What is to be compared: two heads of keys for four of queries, and every second Block sees 32 bytes."""
    return create_simple_rack(
        2,
        2,
        d_model=64,
        d_ff=160,
        n_heads=4,
        n_kv_heads=2,
        sliding_window=[32, None],
        vocab_size=258,
        max_seq_len=2 * seq_len,
    )


def train(spec: ModelSpec, rows: torch.Tensor, settings: Settings) -> nn.Module:
    """A model that has read every row once, `batch_size` of them in a step."""
    model = spec.create("cpu", seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps
    )
    for step, batch in enumerate(rows.split(settings.batch_size)):
        loss = spec.loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == settings.steps - 1:
            print(f"{spec.name}: step {step + 1}, loss {loss.item():.3f} nats")
    return model.eval()


def passages(pages: Sequence[str], n: int, chance: random.Random) -> list[dict[str, Any]]:
    """Passages with four endings, of which one is theirs and the others are of other places."""

    def place() -> tuple[str, str]:
        page = chance.choice(pages)
        start = chance.randrange(len(page) - CONTEXT - ENDING)
        middle = start + CONTEXT
        return page[start:middle], page[middle : middle + ENDING]

    found = []
    while len(found) < n:
        context, right = place()
        endings = list(dict.fromkeys([right, *(place()[1] for _ in range(CHOICES - 1))]))
        if len(endings) == CHOICES:
            chance.shuffle(endings)
            found.append({"context": context, "choices": endings, "answer": endings.index(right)})
    return found


def main() -> None:
    """Train both, ask both, and write what came of it."""
    settings = tyro.cli(Settings)
    # Before anything is trained.
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} not found: pip install 'stackwise[hf,quality,report]'")
    chance = random.Random(0)
    pages = [page for page in documentation_pages() if len(page) > 2 * (CONTEXT + ENDING)]
    chance.shuffle(pages)
    unseen, seen = pages[: len(pages) // 5], pages[len(pages) // 5 :]

    ids = torch.tensor(TOKENIZER.encode("\n\n".join(seen)))
    n_rows = settings.steps * settings.batch_size
    starts = torch.randint(len(ids) - settings.seq_len, (n_rows,), generator=torch.Generator().manual_seed(0))
    rows = torch.stack([ids[start : start + settings.seq_len] for start in starts])

    own = ModelSpec.of(lambda: own_architecture(settings.seq_len), name="own")
    specs = {"llama": llama_baseline(own), "own": own}
    models = {name: train(spec, rows, settings) for name, spec in specs.items()}

    shapes = [
        {"mode": "train", "batch_size": settings.batch_size, "seq_len": settings.seq_len},
        {"mode": "decode", "seq_len": settings.seq_len},
    ]
    speed = compare_architectures(specs, {"cases": shapes})
    questions = passages(unseen, settings.questions, chance)
    endings = row_task("endings", questions, target_delimiter="")
    tasks = Tasks([endings, row_task("unseen pages", [{"text": page} for page in unseen])])
    table = compare_quality(models, tasks, TOKENIZER, speed=speed, max_length=settings.seq_len)
    print(f"\n{table.to_markdown()}")
    settings.output.mkdir(parents=True, exist_ok=True)
    (settings.output / "comparison.md").write_text(table.to_markdown(), encoding="utf-8")
    table.to_csv(settings.output / "comparison.csv")
    table.to_json(settings.output / "comparison.json")
    table.plot(settings.output / "comparison.svg")


if __name__ == "__main__":
    main()
