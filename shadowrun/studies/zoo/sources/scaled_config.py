"""Configurations of transformers scaled down: few layers, small widths, small vocabularies, no dropout.

A configuration says what its numbers mean by their names. They are replaced by these rules, in the configurations
inside as well, and the configuration is made anew, so that what it derives from them fits. Where a model cannot be made
or run so, the next level replaces less.
"""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["LEVELS", "VOCABULARY", "scaled"]

VOCABULARY: Final = 128
LEVELS: Final = 4
"""Ways to scale down, the smallest first."""

# Of each level. 512 has heads of 128, as rotary embeddings with sections of their own want.
_WIDTHS: Final = (32, 64, 512, 0)
_N_HEADS: Final = 4
_DROPOUT: Final = re.compile(r"drop|(?:^|_)mask_(?:time|feature)_prob|jitter")
_LAYERS: Final = re.compile(
    r"(?:^|_)(?<!extract_)(?:n_?)?(?:layers?|blocks|depth|layer_num)$|^num_(?!feat_extract)\w*layers\w*$"
)
_HEADS: Final = re.compile(r"(?:^|_)(?:n_?)?heads?$|^num_\w*heads$")
_KV_HEADS: Final = re.compile(r"(?:key_value|kv)_heads$|n_head_kv$|multi_query_group_num")
_HEAD_WIDTH: Final = re.compile(
    r"head_dim$|head_size$|^d_kv$|^d_head$|attention_head_size$|^qk_(?:nope|rope)_head_dim$|key_query_proj_dim"
)
_WIDTH: Final = re.compile(
    r"hidden_size$|^d_model$|^n_embd$|embed_dim$|^dim$|hidden_dim$|embedding_size$|(?:^|_)projection_dim$|^d_embed$|"
    r"^emb_dim$|word_embed_proj_dim|output_hidden_size|^lru_width$|_hidden_channels$|^width$|^latent_dim$"
)
_INNER: Final = re.compile(r"intermediate|ffn|^d_ff$|^d_inner$|^n_inner$|mlp_dim|feed_forward|feedforward|ffw|^dim_ff$")
_POSITIONS: Final = re.compile(
    r"position_embeddings$|^n_positions$|max_\w*positions$|^max_seq|seq_length$|sliding_window$"
)
_EXPERTS: Final = re.compile(r"experts$|^num_local_experts$|moe_num_experts")
_FEW: Final = re.compile(r"experts_per_tok|top_?k|moe_k$|_experts_per")
_ONE: Final = re.compile(r"^n_group$|^topk_group$|^moe_layer_freq$|_sparse_step$|first_k_dense_replace")
_RANK: Final = re.compile(r"lora_rank$|_rank$|state_size$|^time_step_rank$|d_state$")
_TOKEN: Final = re.compile(r"token_id$|token_index$|_id$")
_LISTED_DEPTH: Final = re.compile(r"depths?$|num_blocks|layers?$|blocks$")
_LISTED_HEADS: Final = re.compile(r"heads$")
_LISTED_WIDTH: Final = re.compile(r"hidden_sizes$|dims?$|channels$|widths?$")
_DERIVED: Final = re.compile(
    r"layer_types?$|layers_types?|architectures|transformers_version|_pattern$|stage_names|out_features|out_indices|"
    r"^id2label$|^label2id$|^torch_dtype$|^dtype$|attn_layer|_attn_implementation|^model_type$|rope_parameters|"
    r"^qk_head_dim$|mlp_layer|layers_block_type|layer_indices|_layer_ids|no_rope_layers|conv_\w+|num_labels|problem_type"
)


def scaled(kind: Any, level: int) -> Any:
    """A configuration of this class, scaled down.

    Args:
        kind: Class of configurations.
        level: Below `LEVELS`: the smallest at 0; at the last, widths and lists stay as they are.

    Raises:
        Exception: What the class raises.
    """
    config = kind(**_smaller(kind(), level))
    for one in (config, *(v for v in vars(config).values() if hasattr(v, "model_type") and hasattr(v, "to_dict"))):
        if getattr(one, "pad_token_id", None) is None:
            one.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _smaller(config: Any, level: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or _DERIVED.search(name):
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            # As its class, which a plain dictionary would not tell the outer one.
            found[name] = type(value)(**_smaller(value, level))
        else:
            new = _replaced(name, value, level)
            # Without groups of queries there must be none afterwards.
            if _KV_HEADS.search(name) and value == getattr(config, "num_attention_heads", None) and new != value:
                new = _N_HEADS
            if new is not value:
                found[name] = new
    _distinct_tokens(found)
    return found


def _distinct_tokens(found: dict[str, Any]) -> None:
    """Special tokens inside the vocabulary, each its own."""
    special = [name for name in sorted(found) if _TOKEN.search(name) and type(found[name]) is int]
    low = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for k, name in enumerate(n for n in special if n not in low):
        found[name] = VOCABULARY - 2 - k
    found.update({name: k for name, k in low.items() if name in found})


def _replaced(name: str, value: Any, level: int) -> Any:
    """The value for a name; the same object where it stays."""
    width = _WIDTHS[level]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return 0.0 if _DROPOUT.search(name) else value
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return _replaced_list(name, value, level) if level < 3 else value
    if type(value) is not int or value < 0:
        return value
    if "vocab" in name and value > VOCABULARY:
        return VOCABULARY
    if _TOKEN.search(name):
        return 3 if value >= 3 else value + 0
    for pattern, most in (
        (_ONE, 1),
        (_FEW, 2),
        (_LAYERS, 2),
        (_EXPERTS, 4),
        (_POSITIONS, 64),
    ):
        if pattern.search(name):
            return min(value, most)
    if not width:
        return value
    for pattern, most in (
        (_KV_HEADS, 2),
        (_HEADS, _N_HEADS),
        (_HEAD_WIDTH, width // 4),
        (_INNER, 2 * width),
        (_WIDTH, width),
        (_RANK, 16),
    ):
        if pattern.search(name):
            return min(value, most)
    if name == "image_size" and level == 0:
        return min(value, 32)
    return min(value, 8) if name == "patch_size" and level == 0 else value


def _replaced_list(name: str, value: Any, level: int) -> Any:
    width = min(_WIDTHS[level], 64)
    if _LISTED_DEPTH.search(name):
        return type(value)(min(v, 1) for v in value)
    if _LISTED_HEADS.search(name):
        return type(value)(min(v, 2) for v in value)
    if _LISTED_WIDTH.search(name):
        return type(value)(max(8, v * width // max(value)) // 8 * 8 for v in value)
    return value
