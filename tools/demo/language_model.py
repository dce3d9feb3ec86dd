"""A small Qwen3 with M-RoPE, or a Mistral, in plain torch for training; parameter names are those of the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LanguageConfig:
    """Sizes of the language model; ``normalised``: queries and keys, as in Qwen3."""

    vocabulary: int = 512
    width: int = 192
    layers: int = 4
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 64
    hidden: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    normalised: bool = True

    @property
    def mrope_section(self) -> tuple[int, int, int]:
        """Rotary frequencies of time, height and width, as Isaac splits them."""
        return self.head_dim // 4, self.head_dim // 8, self.head_dim // 8


def rotary(positions: torch.Tensor, config: LanguageConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[B, L, head_dim]`` for positions ``[3, B, L]``, sections interleaved t h w t h w …."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[..., None].float() * frequencies
    mixed = angles[0].clone()
    for row, count in ((1, config.mrope_section[1]), (2, config.mrope_section[2])):
        mixed[..., row : 3 * count : 3] = angles[row][..., row : 3 * count : 3]
    doubled = torch.cat([mixed, mixed], dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of ``x [B, heads, L, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.head_dim
        self.q_proj = nn.Linear(config.width, config.heads * dim, bias=False)
        self.k_proj = nn.Linear(config.width, config.key_heads * dim, bias=False)
        self.v_proj = nn.Linear(config.width, config.key_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.heads * dim, config.width, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(dim, eps=config.norm_eps) if config.normalised else nn.Identity() for _ in range(2)
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``[B, L, width]`` in and out; ``mask`` ``[B, 1, L, L]``, true where attention is allowed."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.config.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.config.key_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.config.key_heads, -1).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.config.heads // self.config.key_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, L, width]`` in and out."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``[B, L, width]`` in and out."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything but the head."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)


class LanguageModel(nn.Module):
    """Token ids and image embeddings to logits."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(
        self,
        ids: torch.Tensor,
        images: torch.Tensor,
        is_image: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Final hidden states: the last of :meth:`layers`."""
        return self.model.norm(self.layers(ids, images, is_image, positions, mask)[-1])

    def layers(
        self,
        ids: torch.Tensor,
        images: torch.Tensor,
        is_image: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
    ) -> list[torch.Tensor]:
        """What every block gives.

        Args:
            ids: int64 ``[B, L]``.
            images: ``[image tokens of the batch, width]``, in order.
            is_image: bool ``[B, L]``, where those go.
            positions: int64 ``[3, B, L]``.
            mask: bool ``[B, L, L]``.

        Returns:
            For every block ``[B, L, width]``; ``norm`` and ``lm_head`` turn the last one into logits.
        """
        x = self.model.embed_tokens(ids)
        x = x.masked_scatter(is_image[..., None], images.to(x.dtype))
        cos, sin = rotary(positions, self.config)
        out = []
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask[:, None])
            out.append(x)
        return out
