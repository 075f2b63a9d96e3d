"""Which of torch's internal operators a file may name: those that programs record.

Kernels behind an underscore, or behind the name of a library, trust their caller. A dispatch mode records these
families; the others are called from within kernels, or belong to tensors that no file may hold (nested, quantized,
packed). A new one of a later torch is refused until it has a line here.
"""

from __future__ import annotations

import functools
import re
from typing import Final

__all__ = ["is_for_kernels_only", "is_plain_primitive"]

_INTERNAL: Final = re.compile(
    r"_(?!_\w+__$).*|(quantize|quantized|nested|mkldnn|mps|slow_conv|thnn|lstm_mps|conv_depthwise3d|q_)\w*|dequantize"
    r"|empty_quantized|int_repr|to_mkldnn\w*|convolution\w*_overrideable|copy_sparse_to_sparse_?"
)

_FAMILIES: Final = (
    # Pooling, normalisation, loss, resizing and padding.
    r"_adaptive_avg_pool\w+|_(native_)?batch_norm\w*|_(c|p)dist_\w+|_euclidean_dist|_ctc_loss\w*|_fused_rms_norm\w*",
    r"_(log_)?softmax(_backward_data)?|_(masked|safe)_softmax\w*|_prelu_kernel\w*|_upsample_\w+|_pad_(circular|enum)",
    r"_grid_sampler_2d_cpu_fallback\w*|_weight_norm(_interface|_differentiable_backward)?|_masked_scale|_fused_dropout",
    # Attention, embeddings, sequences, recurrent layers.
    r"_(scaled_dot_product|flash|efficient|cudnn)_\w*attention\w*|_fused_sdp_choice|_native_multi_head_attention",
    r"_transformer_encoder_layer_fwd|_embedding_bag\w*|_pack_padded_sequence\w*|_pad_packed_sequence",
    r"_cudnn_(rnn(_backward|_flatten_weight)?|ctc_loss|init_dropout_state)|_use_(cudnn|miopen)_ctc_loss",
    r"_thnn_fused_(gru|lstm)_cell(_backward(_impl)?)?|mkldnn_rnn_layer(_backward)?",
    # Products, convolutions and decompositions.
    r"_addmm_activation|_int_mm|_(scaled_)?(grouped_)?mm(_v2)?|_weight_int8pack_mm|_trilinear|_convolution\w*",
    r"_conv_depthwise2d|_linalg_\w+|_lu_with_info|_fft_(c2c|c2r|r2c)|_histogramdd_\w+|_spdiags",
    r"_sparse_(\w*mm\w*|(log_)?softmax\w*|(csr_)?sum\w*|csr_prod|sparse_matmul|mask_projection|broadcast_to(_copy)?)",
    # Optimizers, lists, mixed precision.
    r"_foreach_\w+|_fused_(adagrad|adam|adamw|sgd)_?|_amp_\w+|_fake_quantize_learnable_\w+|_autocast_to_\w+",
    r"_fake_quantize_per_tensor_affine_cachemask_tensor_qparams|_choose_qparams_per_tensor",
    # Elements, indices, random numbers, copies.
    r"_(add_relu_?|aminmax|chunk_cat|logcumsumexp|unique2?|index_put_impl_?|unsafe_\w+|conj\w*|neg_view\w*)",
    r"_(standard_gamma\w*|sample_dirichlet|dirichlet_grad|is_(all|any)_true|local_scalar_dense|dim_arange)",
    r"_(to_(copy|cpu|dense|sparse\w*)|cast_\w+|coalesce|pin_memory|efficientzerotensor|reshape_copy)",
    r"_(make_dual\w*|unpack_dual|fw_primal\w*|lazy_clone|shape_as_tensor|functional_sym_constrain_range\w*)",
)
_RECORDED: Final = re.compile("|".join(_FAMILIES))
_PACKED: Final = re.compile(r"_to_sparse_semi_structured|_sparse_semi_structured\w*|_nested\w*")

# Those that give torch's public functions, which look, all that they get. `fft_c2r` calls a kernel that does not.
_PRIMITIVES: Final = re.compile(
    r"abs|a?(cos|sin|tan)h?|atan2|bessel_\w+|spherical_bessel_j0|cbrt|ceil|floor|round|trunc|clone|conj(_physical)?|real|imag"
    r"|digamma|lgamma|igammac?|ndtri|zeta|erf(_inv|c|cx)?|exp2?|expm1|log(10|1p|2)?|frexp|isfinite|neg|pow|reciprocal|r?sqrt"
    r"|sign(bit)?|add|sub|mul|div|fmod|remainder|gcd|hypot|nextafter|f?(max|min)|maximum|minimum|eq|ne|ge|gt|le|lt"
    r"|bitwise_\w+|shift_(left|right_arithmetic)|where|fill|amax|amin|prod|sum|var|xor_sum"
    r"|broadcast_in_dim|cat|collapse(_view)?|convert_element_type|reshape|rev|split_dim|squeeze|transpose|view_of"
    r"|full(_like)?|iota|scalar_tensor"
    # Inductor's, in the graphs that it captures.
    r"|inductor_(lookup_seed|seeds?|random|randint|force_stride_order)|fma|prepare_softmax_online"
)


@functools.lru_cache(maxsize=512)
def is_plain_primitive(base: str) -> bool:
    """Whether an operator of the namespace ``prims`` is one that a file may name.

    Args:
        base: Its name without namespace and overload, ``convert_element_type``.
    """
    return _PRIMITIVES.fullmatch(base) is not None


@functools.lru_cache(maxsize=4096)
def is_for_kernels_only(base: str) -> bool:
    """Whether an operator is internal, and none that programs record.

    Args:
        base: Its name without namespace and overload, ``_softmax``.
    """
    if _INTERNAL.fullmatch(base) is None:
        return False
    return _RECORDED.fullmatch(base) is None or _PACKED.fullmatch(base) is not None
