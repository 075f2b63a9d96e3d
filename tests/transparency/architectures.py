"""Small random models of published architectures: one training step of each, no download."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GROUPED = {**_COMMON, "num_key_value_heads": 1}

# Name of the configuration, of the model, and the options.
TEXT = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GROUPED),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 16}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_GROUPED, "head_dim": 16}),
    "phi": ("PhiConfig", "PhiForCausalLM", _COMMON),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _COMMON),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 64},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "vocab_size": 99,
            "max_position_embeddings": 64,
        },
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "vocab_size": 99,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _COMMON),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _COMMON),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**_COMMON, "embedding_size": 32}),
    "deberta_v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", _COMMON),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 99, "max_position_embeddings": 64},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 99,
            "decoder_start_token_id": 0,
        },
    ),
    "clip_text": ("CLIPTextConfig", "CLIPTextModel", _COMMON),
}
IMAGE = {
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
    ),
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    ),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32, "patch_size": 4},
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
}
SPEECH = {
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 99,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 20,
            "decoder_start_token_id": 1,
        },
    )
}
ALL = {**TEXT, **IMAGE, **SPEECH}
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "gpt2", "gpt_neo", "opt", "bloom")


def build(name, change=lambda config: None):
    """A model with random weights, and one batch for it; `change` may set options of its configuration."""
    import transformers

    config_name, model_name, options = ALL[name]
    tokens = _TOKENS if name in TEXT or name in SPEECH else {}
    config = getattr(transformers, config_name)(**{**tokens, **options})
    change(config)
    model = getattr(transformers, model_name)(config)
    ids = torch.randint(3, 99, (2, 16))
    if name in IMAGE:
        return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    if name in SPEECH:
        return model, {"input_features": torch.randn(2, 8, 40), "labels": ids[:, :8]}
    if name == "clip_text":
        return model, {"input_ids": ids}
    return model, {"input_ids": ids, "labels": ids}
