"""Two engines for one GPT-2: that of transformers, and a small one with other names. Each does a prefill or decodes.

Run as ``python engines.py (transformers|own) (decode|prefill TOKENS ...)``; a decoder prints all tokens.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

N_NEW, PROMPT = 6, [3, 1, 4, 1, 5]
LAYERS, WIDTH, HEADS, VOCABULARY = 2, 32, 4, 61


def of_transformers():
    """From a configuration and a seed: no weights are downloaded."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None)
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, initializer_range=0.2)).eval()


class Attention(nn.Module):
    """With a cache of keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cache = None

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).split(WIDTH, 2))
        if self.cache is not None:
            k, v = torch.cat([self.cache[0], k], 2), torch.cat([self.cache[1], v], 2)
        self.cache = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Engine(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, past=0):
        x = self.tok(tokens) + self.pos(torch.arange(past, past + tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens):
        found, past = tokens, 0
        for _ in range(N_NEW):
            logits = self(found[:, past:], past)
            past = found.shape[1]
            found = torch.cat([found, logits[:, -1:].argmax(-1)], 1)
        return found


IN_A_BLOCK = {
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def own():
    """With the weights of the other."""
    state, engine = of_transformers().state_dict(), Engine().eval()
    names = {"tok": "transformer.wte", "pos": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
    for i in range(LAYERS):
        names |= {f"blocks.{i}.{ours}": f"transformer.h.{i}.{theirs}" for ours, theirs in IN_A_BLOCK.items()}
    for name, module in engine.named_modules():
        if name in names:
            for kind, parameter in module.named_parameters(recurse=False):
                given = state[f"{names[name]}.{kind}"]
                # transformers' Conv1D has its weight transposed.
                parameter.data = given.T.contiguous() if "blocks" in name and given.dim() == 2 else given
    return engine


def main(engine, task, *tokens):
    model = of_transformers() if engine == "transformers" else own()
    given = torch.tensor([list(map(int, tokens)) or PROMPT])
    with torch.no_grad():
        if task == "prefill":
            model(given)
        elif engine == "own":
            print(*model.generate(given)[0].tolist())
        else:
            print(*model.generate(given, max_new_tokens=N_NEW, do_sample=False, use_cache=True)[0].tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
