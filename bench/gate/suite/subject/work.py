"""Work: calls of a few milliseconds, one for each kind of program, and iterations that can be added to each.

An iteration is of the kind of the call that it is added to, and takes less than 0.4 % of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .effect import ITERATIONS, SLEEP_SECONDS

__all__ = ["make", "prepare"]

PYTHON_STEPS = 20_000
GEMM_CALLS, GEMM_SIZE, GEMM_ADDED_SIZE = 40, 128, 48
# Two pools of 64 MiB, more than a last-level cache has, copied row by row.
POOL_ROWS, ROW_BYTES, ROWS_A_CALL = 4096, 16 * 1024, 800
LOADER_ROWS, LOADER_BATCH, LOADER_TOKENS = 800, 16, 64
BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 32, 64, 4, 256
DECODED, CONTEXT = 32, 64

# Does the work once, with so many iterations more.
Work = Callable[[int], object]


def make(name: str) -> Callable[[], object]:
    """A call of this work, as the commit has it.

    Raises:
        KeyError: an unknown name.
    """
    work, added, asleep = prepare(name), ITERATIONS.get(name, 0), SLEEP_SECONDS.get(name, 0.0)
    if not asleep:
        return lambda: work(added)

    def call_and_wait() -> object:
        value = work(added)
        time.sleep(asleep)
        return value

    return call_and_wait


def prepare(name: str) -> Work:
    """A work to which any number of iterations can be added.

    Raises:
        KeyError: an unknown name.
    """
    return _MAKERS[name]()


def _python() -> Work:
    def work(added: int) -> object:
        table, total = {}, 0
        for i in range(PYTHON_STEPS + added):
            total = (total * 31 + i) % 1_000_003
            table[i & 255] = total
        return total

    return work


def _gemm() -> Work:
    torch = _torch()
    a, b, c = (torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(3))
    d, e, f = (torch.randn(GEMM_ADDED_SIZE, GEMM_ADDED_SIZE) for _ in range(3))

    def work(added: int) -> object:
        for _ in range(GEMM_CALLS):
            torch.mm(a, b, out=c)
        for _ in range(added):
            torch.mm(d, e, out=f)
        return c

    return work


def _memory() -> Work:
    import numpy as np

    source = np.ones((POOL_ROWS, ROW_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)
    row = 0

    def work(added: int) -> object:
        nonlocal row
        for _ in range(ROWS_A_CALL + added):
            target[row] = source[row]
            row = (row + 1) % POOL_ROWS
        return target

    return work


def _loader() -> Work:
    torch = _torch()
    ids = torch.arange(LOADER_ROWS * LOADER_TOKENS + 1)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return LOADER_ROWS

        def __getitem__(self, i: int) -> dict[str, Any]:
            start = i * LOADER_TOKENS
            return {"input_ids": ids[start : start + LOADER_TOKENS]}

    rows = Rows()
    loader = torch.utils.data.DataLoader(
        rows, batch_size=LOADER_BATCH, shuffle=True, generator=torch.Generator().manual_seed(0)
    )

    def work(added: int) -> object:
        for batch in loader:
            last = batch
        for i in range(added):
            last = rows[i % LOADER_ROWS]
        return last

    return work


def _step() -> Work:
    torch = _torch()
    nn = torch.nn
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    head = nn.Linear(WIDTH, VOCABULARY)
    model = nn.ModuleList([embedding, layer, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    a, b, c = (torch.randn(TOKENS, TOKENS) for _ in range(3))

    def work(added: int) -> object:
        logits = head(layer(embedding(ids[:, :-1]), src_mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for _ in range(added):
            torch.mm(a, b, out=c)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return work


def _decode() -> Work:
    torch = _torch()
    functional = torch.nn.functional
    embedding = torch.randn(VOCABULARY, WIDTH)
    qkv, out = torch.randn(3 * WIDTH, WIDTH) / 8, torch.randn(WIDTH, WIDTH) / 8
    up, down = torch.randn(2 * WIDTH, WIDTH) / 8, torch.randn(WIDTH, 2 * WIDTH) / 8
    keys, values = (torch.zeros(1, HEADS, CONTEXT + DECODED, WIDTH // HEADS) for _ in range(2))
    x_added = torch.randn(WIDTH)

    @torch.inference_mode()
    def work(added: int) -> object:
        token = torch.zeros(1, dtype=torch.long)
        for position in range(CONTEXT, CONTEXT + DECODED):
            x = embedding[token]
            q, k, v = functional.linear(functional.layer_norm(x, (WIDTH,)), qkv).view(3, 1, HEADS, 1, -1)
            keys[:, :, position : position + 1] = k
            values[:, :, position : position + 1] = v
            seen = keys[:, :, : position + 1], values[:, :, : position + 1]
            x = x + functional.linear(functional.scaled_dot_product_attention(q, *seen).view(1, -1), out)
            hidden = functional.silu(functional.linear(functional.layer_norm(x, (WIDTH,)), up))
            token = functional.linear(x + functional.linear(hidden, down), embedding).argmax(-1)
        for _ in range(added):
            functional.linear(x_added, out)
        return token

    return work


def _torch() -> Any:
    # Imported by the work that needs it: the tools pay for what they start.
    import torch

    torch.manual_seed(0)
    return torch


_MAKERS: dict[str, Callable[[], Work]] = {
    "python": _python,
    "gemm": _gemm,
    "memory": _memory,
    "step": _step,
    "decode": _decode,
    "loader": _loader,
}
