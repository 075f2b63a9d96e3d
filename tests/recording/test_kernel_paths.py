"""Names of kernels from what libraries print, and their paths. The lines are as they were printed, shortened."""

import pytest

from shadowrun.recording.kernel_paths import kernel_name, mkl_parts, of_the_program, onednn_parts, path_of

ONEDNN = "onednn_verbose,v1,primitive,exec,cpu,"
REORDER = f"{ONEDNN}reorder,jit:blk,undef,src:f32::blocked:abcd::f0 dst:f32::blocked:aBcd16b::f0,,,1x64x32x32,8.6\n"
CONVOLUTION = f"{ONEDNN}convolution,jit:avx512_core,forward_training,src:f32,,alg:convolution_direct,mb1_ic64,16.2\n"
HEADER = (
    "onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)\n"
    "onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,exec_time\n"
    "onednn_verbose,v1,graph,exec,cpu,100002,matmul_post_ops,mm,,fpm:strict,larger_partition_kernel_t,dnnl,0.1\n"
)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("aten::mkldnn_convolution; onednn convolution jit:avx512_core", "direct"),
        ("onednn convolution jit_1x1:avx512_core", "direct"),
        ("onednn convolution jit_dw:avx2", "direct"),
        ("onednn convolution ref:any", "direct"),
        ("onednn convolution gemm:jit", "GEMM"),
        ("onednn convolution x64:gemm:jit", "GEMM"),
        ("onednn convolution brgconv:avx512_core", "GEMM"),
        ("onednn convolution brgconv_1x1:avx512_core_bf16", "GEMM"),
        ("onednn convolution jit_wino:avx512_core", "Winograd"),
        ("onednn convolution wino_reorder", "Winograd"),
        ("onednn deconvolution jit:uni", "direct"),
        ("onednn matmul brg_matmul:avx512_core_bf16", "GEMM"),
        ("onednn matmul gemm:jit:f32", "GEMM"),
        ("onednn matmul ref:any", "direct"),
        ("onednn inner_product gemm:jit", "GEMM"),
        ("onednn eltwise jit:avx2", ""),
        ("onednn reorder jit:blk", ""),
        ("aten::_slow_conv2d_forward; mkl SGEMM CNR:OFF", "GEMM"),
        ("aten::addmm; mkl SGEMM_BATCH CNR:COMPATIBLE", "GEMM"),
        ("aten::addmv_; mkl DGEMV", "GEMM"),
        ("aten::dot; mkl SDOT CNR:OFF", "direct"),
        ("aten::_fft_r2c; mkl FFT CNR:OFF", "FFT"),
        ("aten::linalg_lu_factor_ex; mkl SGETRF CNR:OFF", ""),
        ("aten::_fft_r2c AVX2", "FFT"),
        ("aten::bmm AVX2", "GEMM"),
        ("aten::slow_conv_dilated2d AVX2", "GEMM"),
        ("aten::_conv_depthwise2d AVX2", "direct"),
        ("aten::mkldnn_convolution", ""),
        ("aten::add AVX512", ""),
        ("aten::commutative AVX512", ""),
        ("cuda void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(...)", "Winograd"),
        ("cuda ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1", "Winograd"),
        ("cuda void fft2d_r2c_32x32<float, false, 1u, false>(...)", "FFT"),
        ("cuda sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nhwc_tilesize128x128x16", "GEMM"),
        ("cuda void cutlass::Kernel2<cutlass_80_wmma_tensorop_s161616gemm_bf16>(...)", "GEMM"),
        ("cuda nvjet_hsh_128x64_64x5_1x2_h_bz_coopA_NNT", "GEMM"),
        ("cuda Cijk_Ailk_Bljk_SB_MT64x64x16_SN", "GEMM"),
        ("cuda void cudnn::cnn::conv2d_grouped_direct_kernel<float>(...)", "direct"),
        ("cuda void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<1, float, int>(...)", "direct"),
        ("cuda void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(...)", ""),
        ("xpu gemm_kernel", "GEMM"),
        ("", ""),
    ],
)
def test_path(name, path):
    assert path_of(name) == path


def test_onednn_lines():
    text = (HEADER + REORDER + CONVOLUTION + CONVOLUTION + REORDER).encode()
    assert onednn_parts(text) == ["onednn convolution jit:avx512_core"]
    assert onednn_parts(REORDER.encode()) == ["onednn reorder jit:blk"]
    older = b"onednn_verbose,exec,cpu,matmul,gemm:jit,undef,src_f32,,,64x64:64x64,0.1\n"
    timed = b"onednn_verbose,v1,1693533460193.3,primitive,exec,gpu:0,convolution,jit:ir,forward,,,,,1\n"
    assert onednn_parts(older + timed) == ["onednn matmul gemm:jit", "onednn convolution jit:ir"]
    assert onednn_parts(b"onednn_verbose,v1,primitive,exec\nonednn_verbose,\xff,exec\nsomething else\n") == [
        "onednn  ",
        "onednn  ",
    ]


def test_mkl_lines():
    text = (
        b"MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture, Lnx 2.60GHz lp64\n"
        b"MKL_VERBOSE SGEMM(N,N,64,0x7ffc,0x55) 24.02ms CNR:OFF Dyn:1 FastMM:1 TID:0  NThr:2\n"
        b"MKL_VERBOSE SGEMM(T,N,1) 1us CNR:OFF Dyn:1 FastMM:1 TID:0  NThr:2\n"
        b"MKL_VERBOSE SGEMM(T,N,1) 1us CNR:COMPATIBLE Dyn:1\n"
        b"MKL_VERBOSE MKL_SOMATCOPY(R, N, 14) 15.25us CNR:OFF Dyn:1\n"
        b"MKL_VERBOSE DGETRF(8,8) 3us\n"
    )
    assert mkl_parts(text) == ["mkl SGEMM CNR:OFF", "mkl SGEMM CNR:COMPATIBLE", "mkl DGETRF"]


def test_what_the_program_prints_is_left():
    text = b"mine " + CONVOLUTION.encode() + b"and mine\n" + b"MKL_VERBOSE SGEMM(N) 1us\n" + b"no newline"
    assert of_the_program(text) == b"mine and mine\nno newline"


def test_names_are_bounded():
    name = kernel_name([f"cuda kernel{n}{'<float>' * 100}" for n in range(40)] * 2)
    assert len(name) < 16 * 310
    assert name.endswith("; 24 more")
    assert kernel_name([]) == ""
