"""Models of transformers scaled down: a small configuration, and inputs from the signature of its own `forward`."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.studies.zoo import input_values
from shadowrun.studies.zoo.graph import Fill, Input
from shadowrun.studies.zoo.sources.source import LeftOut

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LEVELS", "VOCABULARY", "candidates", "scaled"]

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
    # Made anew and not changed in place: many configurations derive lists and widths from others when they are made.
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
        # Derived from what is scaled: with the old lists, a class refuses its new number of layers.
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
    # From the end, where `_HIGHEST_TOKEN` keeps inputs away: a token of an image in a text asks for an image.
    for k, name in enumerate(n for n in special if n not in low):
        found[name] = VOCABULARY - 2 - k
    found.update({name: k for name, k in low.items() if name in found})


def _replaced(name: str, value: Any, level: int) -> Any:
    """The value for a name; the same object where it stays."""
    width = _WIDTHS[level]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        # Random numbers differ between devices: a program without them can be compared in all its values.
        return 0.0 if _DROPOUT.search(name) else value
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return _replaced_list(name, value, level) if level < 3 else value
    if type(value) is not int or value < 0:
        return value
    if "vocab" in name and value > VOCABULARY:
        return VOCABULARY
    if _TOKEN.search(name):
        # Inside the small vocabulary: an embedding looks up a token without a look at its size.
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


# Inputs of a model of transformers, from the signature of its own `forward`.

_BATCH: Final = 2
_LENGTH: Final = 8
# Above it lie the special tokens of scaled configurations.
_HIGHEST_TOKEN: Final = 96
_IDS: Final = ("input_ids", "decoder_input_ids", "entity_ids")
_ONES: Final = ("attention_mask", "decoder_attention_mask", "entity_attention_mask")


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that a model may take, the likeliest first: with labels, with fewer inputs, in other shapes.

    Raises:
        LeftOut: An input that it needs has no rule.
    """
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    needed = [
        n
        for n, p in parameters.items()
        if p.default is inspect.Parameter.empty and p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    first = [main] if main in parameters else []
    if not first and "input_ids" in parameters:
        first = ["input_ids"]
    pairs = [n for n in ("input_ids", "pixel_values") if n in parameters and main in ("input_ids", "pixel_values")]
    for names in dict.fromkeys(
        (tuple(dict.fromkeys([*first, *needed])), tuple(dict.fromkeys([*first, *needed, *pairs])))
    ):
        for shape in range(_n_shapes(names)):
            given = {name: _made(model, name, shape) for name in names}
            given |= _extras(model, parameters, given)
            labels = _labels(model, given) if "labels" in parameters else None
            yield from ({**given, "labels": label} for label in labels or ())
            yield given


def _n_shapes(names: tuple[str, ...]) -> int:
    return max((2 if n in _AUDIO else 1 for n in names), default=1)


_AUDIO: Final = ("input_features", "input_values")


def _extras(model: Any, parameters: Any, given: dict[str, Any]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    config = model.config
    if (
        getattr(config, "is_encoder_decoder", False)
        and "decoder_input_ids" in parameters
        and "labels" not in parameters
    ):
        extras["decoder_input_ids"] = _tokens("decoder_input_ids")
    if "use_cache" in parameters:
        # A cache is state of a Python class: what a call adds to it would be missing in the captured graph.
        extras["use_cache"] = False
    if "attention_mask" in parameters and "input_ids" in given:
        extras["attention_mask"] = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    # Contrastive models compute a loss only then, and without one there is no backward pass.
    if "return_loss" in parameters:
        extras["return_loss"] = True
    return {k: v for k, v in extras.items() if k not in given}


def _tokens(name: str) -> torch.Tensor:
    return input_values.make_input(Input(name, (_BATCH, _LENGTH), torch.int64, Fill("integers", 5, _HIGHEST_TOKEN)))


def _floats(name: str, *shape: int) -> torch.Tensor:
    return input_values.make_input(Input(name, shape))


def _of(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these numbers that a configuration, or one inside it, has."""
    inner = [v for v in vars(config).values() if hasattr(v, "model_type") and hasattr(v, "to_dict")]
    for one in (config, *inner):
        for name in names:
            found = getattr(one, name, None)
            if isinstance(found, (int, list, tuple)) and not isinstance(found, bool):
                return found
    return default


def _made(model: Any, name: str, shape: int) -> Any:
    config = model.config
    if name in _IDS:
        return _tokens(name)
    if name in _ONES or name.endswith("attention_mask"):
        return torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    if name == "token_type_ids":
        return torch.zeros(_BATCH, _LENGTH, dtype=torch.int64)
    if name == "bbox":
        low = input_values.make_input(Input(name, (_BATCH, _LENGTH, 2), torch.int64, Fill("integers", 0, 40)))
        # Corners in order: models refuse a box whose right side is left of its left one.
        return torch.cat([low, low + 5], -1)
    if name in ("pixel_values", "pixel_values_videos", "image", "images"):
        return _image(config, name)
    if name == "input_values":
        n_bins, n_frames = _of(config, "num_mel_bins"), _of(config, "max_length")
        return _floats(name, _BATCH, n_frames, n_bins) if n_bins and n_frames else _sound(name, shape)
    if name == "input_features":
        n_bins = _of(
            config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim", default=80
        )
        n_frames = 2 * _of(config, "max_source_positions", default=32)
        return _floats(name, _BATCH, n_bins, n_frames) if shape == 0 else _floats(name, _BATCH, n_frames, n_bins)
    if name in ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features"):
        return _series(config, name)
    # A guess could give a program that computes NaN alone, which passes everywhere.
    raise LeftOut(f"no rule for its input {name}")


def _sound(name: str, shape: int) -> torch.Tensor:
    return _floats(name, _BATCH, 2000) if shape == 0 else _floats(name, _BATCH, 1, 2000)


def _image(config: Any, name: str) -> torch.Tensor:
    size = _of(config, "image_size", "img_size", default=64)
    height, width = (size, size) if isinstance(size, int) else (*size, *size)[:2]
    channels = _of(config, "num_channels", "in_channels", "in_chans", "input_channels", default=3)
    frames = _of(config, "num_frames", default=0)
    if isinstance(channels, int) and (frames or name.endswith("videos")):
        return _floats(name, _BATCH, frames or 4, channels, height, width)
    return _floats(name, _BATCH, channels if isinstance(channels, int) else 3, height, width)


def _series(config: Any, name: str) -> torch.Tensor:
    lags = _of(config, "lags_sequence", default=[0])
    past = _of(config, "context_length", default=16) + (max(lags) if isinstance(lags, (list, tuple)) else 0)
    future = _of(config, "prediction_length", default=4) or 4
    n = future if name.startswith("future") else past
    channels = _of(config, "input_size", "num_input_channels", default=1)
    if name.endswith("time_features"):
        return _floats(name, _BATCH, n, _of(config, "num_time_features", default=0))
    if name.endswith("mask"):
        return torch.ones(_BATCH, n) if channels == 1 else torch.ones(_BATCH, n, channels)
    is_plain = channels == 1 and not hasattr(config, "num_input_channels")
    return _floats(name, _BATCH, n) if is_plain else _floats(name, _BATCH, n, channels)


def _labels(model: Any, given: dict[str, Any]) -> list[Any]:
    """Labels by what the head computes."""
    kind = type(model).__name__
    if "Detection" in kind or "Segmentation" in kind:
        return [_boxes(), torch.zeros(_BATCH, *_size_of(given), dtype=torch.int64)]
    one = torch.zeros(_BATCH, dtype=torch.int64)
    each = torch.zeros(_BATCH, _LENGTH, dtype=torch.int64)
    tokens = _tokens("labels")
    order = [one, each, tokens]
    if "input_ids" in given and "SequenceClassification" not in kind and "MultipleChoice" not in kind:
        order = [tokens, each, one]
    if any(word in kind for word in ("TokenClassification", "FrameClassification")):
        order = [each, one]
    if any(word in kind for word in ("ConditionalGeneration", "CausalLM", "MaskedLM", "CTC", "Seq2Seq")):
        order = [tokens, each, one]
    return order


def _size_of(given: dict[str, Any]) -> tuple[int, int]:
    images = [v for k, v in given.items() if k == "pixel_values"]
    return tuple(images[0].shape[-2:]) if images else (8, 8)


def _boxes() -> list[dict[str, torch.Tensor]]:
    box = torch.tensor([[0.5, 0.5, 0.25, 0.25]])
    return [{"class_labels": torch.zeros(1, dtype=torch.int64), "boxes": box} for _ in range(_BATCH)]
