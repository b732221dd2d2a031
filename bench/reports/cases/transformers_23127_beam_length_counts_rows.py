"""transformers#23127 (huggingface/transformers): beam search adds 1 to the length for each row of the batch.

The length belongs to the score that an open beam can still reach. A later row of the batch assumes a length
that is too large, so it ends its search at another step than the same prompt alone.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

EOS, PAD = 1, 0


class BeamHypotheses:
    """Best finished sequences of a row."""

    def __init__(self, num_beams: int, length_penalty: float) -> None:
        self.num_beams, self.length_penalty = num_beams, length_penalty
        self.beams: list[tuple[float, torch.Tensor]] = []

    def add(self, hyp: torch.Tensor, sum_logprobs: float) -> None:
        """Add a sequence, and drop the worst one if there are too many."""
        self.beams.append((sum_logprobs / len(hyp) ** self.length_penalty, hyp))
        self.beams = sorted(self.beams, key=lambda beam: -beam[0])[: self.num_beams]

    def is_done(self, best_sum_logprobs: float, cur_len: int) -> bool:
        """Return True if no open beam can become better than the worst finished one."""
        if len(self.beams) < self.num_beams:
            return False
        return self.beams[-1][0] >= best_sum_logprobs / cur_len**self.length_penalty


class GPTBlock(nn.Module):
    """Pre-norm layer."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.c_fc, self.mlp_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, n_embd)."""
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPTForCausalLM(nn.Module):
    """Language model with greedy and beam search; EOS ends a sequence."""

    def __init__(self, *, once: bool, vocab_size: int = 64, n_embd: int = 32) -> None:
        super().__init__()
        self.once = once
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(64, n_embd)
        self.h = nn.ModuleList(GPTBlock(n_embd) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        eos_token_id: int = EOS,
    ) -> torch.Tensor:
        """Return the sequences, padded after their end."""
        if num_beams > 1:
            return self.beam_search(input_ids, max_new_tokens, num_beams, length_penalty, eos_token_id)
        open_rows = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for _ in range(max_new_tokens):
            new = self(input_ids)[:, -1].argmax(dim=-1).where(open_rows, PAD)
            input_ids = torch.cat([input_ids, new[:, None]], dim=1)
            open_rows = open_rows & (new != eos_token_id)
        return input_ids

    def beam_search(
        self, input_ids: torch.Tensor, max_new_tokens: int, num_beams: int, length_penalty: float, eos: int
    ) -> torch.Tensor:
        """Return the best sequence of each row."""
        rows, vocab = len(input_ids), self.lm_head.out_features
        hyps = [BeamHypotheses(num_beams, length_penalty) for _ in range(rows)]
        done = [False] * rows
        ids = input_ids.repeat_interleave(num_beams, dim=0).view(rows, num_beams, -1)
        scores = torch.full((rows, num_beams), -1e9, device=ids.device)
        scores[:, 0] = 0  # the beams of a row are equal before the first step
        for _ in range(max_new_tokens):
            log_probs = (
                self(ids.flatten(0, 1))[:, -1].float().log_softmax(dim=-1).view(rows, num_beams, vocab)
            )
            next_scores, best = (scores[..., None] + log_probs).flatten(1).topk(2 * num_beams, dim=-1)
            cur_len, chosen = ids.shape[2] + 1, []
            for row in range(rows):
                beams = [ids.new_zeros(ids.shape[2] + 1)] * num_beams
                new_scores = [0.0] * num_beams
                if not done[row]:
                    beams, new_scores = self._step(hyps[row], ids[row], next_scores[row], best[row], eos)
                cur_len = ids.shape[2] + 1 if self.once else cur_len + 1
                done[row] = done[row] or hyps[row].is_done(float(next_scores[row].max()), cur_len)
                chosen.append(torch.stack(beams))
                scores[row] = torch.tensor(new_scores)
            ids = torch.stack(chosen)
            if all(done):
                break
        for row in (row for row in range(rows) if not done[row]):
            for beam, score in zip(ids[row], scores[row], strict=True):
                hyps[row].add(beam, float(score))
        finished = [hyp.beams[0][1] for hyp in hyps]
        return nn.utils.rnn.pad_sequence(finished, batch_first=True, padding_value=PAD)

    def _step(
        self, hyp: BeamHypotheses, ids: torch.Tensor, next_scores: torch.Tensor, best: torch.Tensor, eos: int
    ) -> tuple[list[torch.Tensor], list[float]]:
        """Return the open beams of a row and their scores."""
        beams, scores, vocab = [], [], self.lm_head.out_features
        for rank, (score, index) in enumerate(zip(next_scores.tolist(), best.tolist(), strict=True)):
            sequence = torch.cat([ids[index // vocab], ids.new_tensor([index % vocab])])
            if index % vocab != eos:
                beams.append(sequence)
                scores.append(score)
            elif rank < hyp.num_beams:
                hyp.add(sequence, score)
        return beams[: hyp.num_beams], scores[: hyp.num_beams]


def buggy() -> nn.Module:
    """Add 1 in the loop over rows."""
    return GPTForCausalLM(once=False)


def healthy() -> nn.Module:
    """One length for all rows."""
    return GPTForCausalLM(once=True)


def buggy_declared() -> ModelSpec:
    """State a causal model."""
    return ModelSpec.of(buggy, causal=True, max_length=64)


def healthy_declared() -> ModelSpec:
    """State a causal model."""
    return ModelSpec.of(healthy, causal=True, max_length=64)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the differences between the lengths that the rows of a batch assume in the first step."""
    lengths: list[int] = []
    is_done = BeamHypotheses.is_done
    try:
        BeamHypotheses.is_done = lambda self, best, cur_len: (
            lengths.append(cur_len) or is_done(self, best, cur_len)
        )
        model.generate(torch.arange(2, 17).view(3, 5), max_new_tokens=1, num_beams=2)
    finally:
        BeamHypotheses.is_done = is_done
    return torch.tensor(lengths) - lengths[0]
