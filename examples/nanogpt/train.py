"""Train the GPT on the documentation bundled with Python, with a guard that inspects each step."""

import pydoc_data.topics

import torch
from model import GPT, GPTConfig

from stackwise import Guard

TEXT = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()))


def batches(n_steps, batch_size=16, block_size=64, seed=0):
    """Yield pairs of inputs and targets, each (batch_size, block_size)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        starts = torch.randint(len(TEXT) - block_size - 1, (batch_size, 1), generator=generator)
        rows = TEXT[starts + torch.arange(block_size + 1)]
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model, batch):
    return model(*batch)[1]


def train(n_steps=100):
    """Return the trained model and the guard."""
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, loss_of=loss_of)
    for batch in guard.batches(list(batches(n_steps))):
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss)  # inspects the step, then updates the weights or skips
        if guard.steps % 20 == 0:
            print(f"step {guard.steps}: loss {loss.item():.2f}")
    return model, guard


if __name__ == "__main__":
    _, guard = train()
    print(f"alarms: {len(guard.alarms)}")
