"""GPU libraries are recognised by name, and their functions by their effect on the caller."""

from __future__ import annotations

import re

from loops import each

from distdiag.knowledge import gpu_libraries

LIBRARIES = [
    ("libcuda.so.1", "NVIDIA", "driver"),
    ("libcuda.so.550.90.07", "NVIDIA", "driver"),
    ("libcudart.so.13", "NVIDIA", "driver"),
    ("libcudart-e409450e.so.11.0", "NVIDIA", "driver"),  # as auditwheel names a copy
    ("libnvidia-ptxjitcompiler.so.550.90.07", "NVIDIA", "compiler"),
    ("libnccl.so.2.27.5", "NVIDIA", "communication"),
    ("libamdhip64.so.6", "AMD", "driver"),
    ("libhsa-runtime64.so.1.14.60200", "AMD", "driver"),
    ("librccl.so.1.0", "AMD", "communication"),
    ("libze_intel_gpu.so.1.6.31294", "Intel", "driver"),
    ("libze_loader.so.1", "Intel", "driver"),
    ("libccl.so.1.0", "Intel", "communication"),
    ("libascendcl.so", "Ascend", "driver"),
    ("libruntime.so", "Ascend", "driver"),
    ("libhccl.so", "Ascend", "communication"),
    ("libmusart.so.1.0", "Moore Threads", "driver"),
    ("libmccl.so.2", "Moore Threads", "communication"),
    ("libtorch_cuda.so", "", ""),
    ("libcudnn.so.9", "", ""),
    ("libnccl-net.so", "", ""),
    ("libc.so.6", "", ""),
]
CALLS = {
    "waits": [
        *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoHAsync_v2", "cudaMemcpyAsync"),
        *("cudaDeviceSynchronize", "cudaStreamSynchronize_ptsz", "cudaEventSynchronize", "cudaFree", "cuMemFree_v2"),
        *("hipStreamSynchronize", "hipMemcpyWithStream", "hsa_signal_wait_scacquire", "zeEventHostSynchronize"),
        *("zeCommandQueueSynchronize", "aclrtSynchronizeStream", "aclrtSynchronizeStreamWithTimeout"),
        *("musaStreamSynchronize", "muStreamSynchronize"),
    ],
    "launches": [
        *("cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernel", "cudaLaunchKernelExC_ptsz", "__cudaLaunchKernel"),
        *("cudaGraphLaunch", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel", "hipLaunchKernel"),
        *("zeCommandListAppendLaunchKernel", "aclrtLaunchKernel", "musaLaunchKernel"),
    ],
    "loads": [
        *("cuInit", "cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData", "cuLinkComplete"),
        *("cuDevicePrimaryCtxRetain", "cudaMalloc", "cudaSetDevice", "hipModuleLoad", "zeInit", "aclInit"),
    ],
    "init": [
        *("ncclCommInitRank", "ncclCommInitRankConfig", "pncclCommInitRank", "ncclCommSplit", "onecclCommInitRank"),
        *("HcclCommInitRootInfo", "HcclCommInitClusterInfo", "mcclCommInitRank"),
    ],
    "abort": ["ncclCommAbort", "ncclCommDestroy", "ncclCommFinalize", "HcclCommDestroy"],
    "": ["cuStreamQuery", "cudaEventRecord", "cudaFreeAsync", "cudaGetDevice", "ncclAllReduce", "ncclGetUniqueId"],
}


@each("name, vendor, kind", LIBRARIES)
def test_a_library_is_known_by_its_base_name(name: str, vendor: str, kind: str) -> None:
    assert gpu_libraries.kind_of_library(name) == kind
    on_nodes = any(re.fullmatch(pattern, name) for pattern in gpu_libraries.for_nodes())
    assert on_nodes == (vendor != "")


@each("meaning", CALLS)
def test_a_function_is_known_by_its_whole_name(meaning: str) -> None:
    for call in CALLS[meaning]:
        assert gpu_libraries.meaning_of(call) == meaning, call
