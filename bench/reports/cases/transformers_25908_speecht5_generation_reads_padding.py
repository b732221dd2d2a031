"""transformers#25908 (huggingface/transformers): SpeechT5 generates speech from text and its padding.

generate_speech makes an encoder mask of ones, so that encoder and cross-attention read padding tokens.
The forward call has the right mask. https://github.com/huggingface/transformers/pull/25943
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SpeechT5ForTextToSpeech(nn.Module):
    """Encoder of text and decoder of spectra, of which it makes `reduction_factor` in each step."""

    main_input_name = "input_ids"

    def __init__(self, *, mask_in_generation: bool, hidden_size: int = 32) -> None:
        super().__init__()
        self.mask_in_generation = mask_in_generation
        self.config = SimpleNamespace(vocab_size=40, pad_token_id=1, num_mel_bins=8, reduction_factor=2)
        self.embed_tokens = nn.Embedding(40, hidden_size, padding_idx=1)
        self.text_positions = nn.Parameter(0.1 * torch.randn(64, hidden_size))
        self.speech_positions = nn.Parameter(0.1 * torch.randn(256, hidden_size))
        sizes = {"d_model": hidden_size, "nhead": 4, "dim_feedforward": 64, "dropout": 0.0}
        options = sizes | {"activation": F.gelu, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**options) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**options) for _ in range(2))
        self.prenet = nn.Sequential(nn.Linear(8, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size))
        self.speaker_embeds_layer = nn.Linear(16, hidden_size)
        self.feat_out, self.prob_out = nn.Linear(hidden_size, 16), nn.Linear(hidden_size, 2)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids) + self.text_positions[: input_ids.shape[1]]
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        return x

    def decode(self, frames: Tensor, speaker: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        x = self.prenet(frames) + self.speaker_embeds_layer(F.normalize(speaker, dim=-1))[:, None]
        x = x + self.speech_positions[: frames.shape[1]]
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for layer in self.decoder:
            x = layer(x, encoded, tgt_mask=future, memory_key_padding_mask=mask == 0)
        return x

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_values: Tensor | None = None,
        speaker_embeddings: Tensor | None = None,
    ) -> SimpleNamespace:
        """Spectra after each frame of `decoder_input_values` (B, frames, mel bins), and logits to stop."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        encoded = self.encode(input_ids, mask)
        x = self.decode(decoder_input_values, speaker_embeddings, encoded, mask)
        spectrogram = self.feat_out(x).unflatten(-1, (2, 8)).flatten(1, 2)
        return SimpleNamespace(spectrogram=spectrogram, logits=self.prob_out(x).flatten(1))

    @torch.no_grad()
    def generate_speech(
        self, input_ids: Tensor, speaker_embeddings: Tensor, threshold: float = 0.5, maxlenratio: float = 20.0
    ) -> Tensor:
        """Spectra (frames, mel bins) of one text."""
        mask = torch.ones_like(input_ids)
        if self.mask_in_generation:
            mask = 1 - (input_ids == self.config.pad_token_id).int()
        encoded, spectra = self.encode(input_ids, mask), []
        frames = encoded.new_zeros(1, 1, self.config.num_mel_bins)
        for _ in range(int(mask.sum() * maxlenratio / self.config.reduction_factor)):
            last = self.decode(frames, speaker_embeddings, encoded, mask)[:, -1]
            spectra.append(self.feat_out(last).view(1, self.config.reduction_factor, -1))
            frames = torch.cat([frames, spectra[-1][:, -1:]], dim=1)
            if self.prob_out(last).sigmoid().sum() >= threshold:
                break
        return torch.cat(spectra, dim=1)[0]


def buggy() -> nn.Module:
    """A mask of ones."""
    return SpeechT5ForTextToSpeech(mask_in_generation=False)


def healthy() -> nn.Module:
    """A mask without padding tokens."""
    return SpeechT5ForTextToSpeech(mask_in_generation=True)


def observe(model: nn.Module) -> float:
    """Largest change of the first 8 frames if the text is padded."""
    text, speaker = torch.tensor([[4, 9, 17, 30, 12, 2]]), torch.ones(1, 16)
    padded = F.pad(text, (0, 5), value=model.config.pad_token_id)
    plain, other = (model.eval().generate_speech(ids, speaker, threshold=2.1) for ids in (text, padded))
    return (plain[:8] - other[:8]).abs().max().item()
