"""Plain PyTorch modules with the parameter names of the library's models: the independent side of export tests."""

import torch
from torch import nn
from torch.nn import functional


class GPTAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x):
        b, s, h = x.shape
        # Rows ordered (heads, 3, head size), as Megatron-LM and the library's models have them.
        q, k, v = self.qkv(x).view(b, s, self.heads, 3 * h // self.heads).transpose(1, 2).chunk(3, dim=-1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(b, s, h))


class GPTFeedForward(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc, self.proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.proj(functional.gelu(self.fc(x), approximate="tanh"))


class GPTBlock(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(hidden), GPTAttention(hidden, heads)
        self.ln_2, self.mlp = nn.LayerNorm(hidden), GPTFeedForward(hidden)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The preset gpt2, with its head tied to the embedding."""

    def __init__(self, layers, heads, hidden, vocabulary, positions):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.h = nn.ModuleList(GPTBlock(hidden, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LlamaAttention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, theta):
        super().__init__()
        self.heads, self.kv_heads, self.theta, size = heads, kv_heads, theta, hidden // heads
        self.q_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv_heads * size, bias=False) for _ in range(2))

    def rotated(self, x):
        s, d = x.shape[-2:]
        frequencies = self.theta ** (-torch.arange(0, d, 2, device=x.device) / d)
        angles = torch.outer(torch.arange(s, device=x.device), frequencies)
        cos, sin = (torch.cat([f(angles)] * 2, dim=-1).to(x.dtype) for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], dim=-1) * sin

    def forward(self, x):
        b, s, h = x.shape
        projected = (f(x) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.view(b, s, -1, h // self.heads).transpose(1, 2) for part in projected)
        out = functional.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(b, s, h))


class LlamaFeedForward(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, intermediate, theta, eps):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(hidden, eps) for _ in range(2))
        self.self_attn = LlamaAttention(hidden, heads, kv_heads, theta)
        self.mlp = LlamaFeedForward(hidden, intermediate)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The presets llama-*."""

    def __init__(self, layers, heads, kv_heads, hidden, intermediate, vocabulary, theta, eps):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            LlamaLayer(hidden, heads, kv_heads, intermediate, theta, eps) for _ in range(layers)
        )
        self.norm, self.lm_head = nn.RMSNorm(hidden, eps), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens, targets=None):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
