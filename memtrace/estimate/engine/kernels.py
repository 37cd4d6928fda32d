"""Which kernels run: bitsandbytes' 4-bit product and PyTorch's attention back ends, by GPU and shape.

Sources: ``bitsandbytes/backends/cuda/ops.py`` 0.50 (``_gemm_4bit_use_custom_cuda``); PyTorch 2.11
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``. Verified on measurements for sm_90 only.
"""

from __future__ import annotations

from memtrace.frozen import dataclass


@dataclass(frozen=True, slots=True)
class KernelDevice:
    """What kernel choice depends on: compute capability (major, minor) and number of multiprocessors.

    ``product_rows`` fixes the number of tokens that the 4-bit product's choice is made for (None: the real one),
    so that runs of other lengths keep the same sequence of allocations.
    """

    capability: tuple[int, int]
    multiprocessors: int
    product_rows: int | None = None

    @property
    def cublas_workspace_bytes(self) -> int:
        """cuBLAS workspace of one thread's handle: 32 MiB on sm_90, else 2×4 MiB + 8×16 KiB (``CUDABlas``)."""
        return 33_554_432 if self.capability[0] == 9 else 8_519_680

    @property
    def cublaslt_workspace_bytes(self) -> int:
        """cuBLASLt workspace of one thread: PyTorch's default of 1 MiB."""
        return 1_048_576


def fused_4bit_product(device: KernelDevice, rows: int, outputs: int, inputs: int) -> bool:
    """Whether ``gemm_4bit`` runs its fused kernel, which needs no 16-bit copy of the weight.

    ``rows`` tokens (M), ``outputs`` × ``inputs`` weight (N × K). 16-bit activations, NVIDIA.
    """
    m, n, k = rows, outputs, inputs
    if m > 1536 or k % 64:
        return False
    if m <= 4:
        return True
    major, minor = device.capability
    sms, blocks = device.multiprocessors, (n + 63) // 64
    if major < 7 or (major == 7 and minor < 5):
        return m < 8
    if (major, minor) == (8, 7) or major == 11:
        return False
    if major == 10:
        if blocks >= sms * 3:
            return m <= 32
        return blocks >= sms and k < n and m <= 8
    if n * k < 4 * 1024 * 1024:
        return _small_weight(device, m, n, k, blocks)
    if m > 512:
        return False
    if m < 8:
        return _few_rows(device, m, n, k, blocks)
    return _large_weight(device, m, n, k, blocks)


def _small_weight(device: KernelDevice, m: int, n: int, k: int, blocks: int) -> bool:
    """Weights below 4 Mi elements: the dequantisation dominates."""
    major, minor = device.capability
    sms = device.multiprocessors
    sm75, sm80, sm90 = (major, minor) == (7, 5), (major, minor) == (8, 0), major == 9
    if k * 2 < n:
        if sm80:
            return m <= (1536 if blocks * 3 < sms else 512)
        if sm90:
            return m <= (512 if blocks * 3 < sms else 320)
        if sm75:
            if blocks >= sms * 3 or (k < 704):
                return m <= 320
            return m <= (64 if k >= 1024 else 96)
        if blocks >= sms:
            return m <= 320
        return m <= (192 if blocks * k > sms * 320 else 320)
    quarter = blocks * 4 <= sms
    if sm80 and quarter:
        return m <= (32 if blocks * 8 <= sms else 128) if k >= n else m <= 384
    if sm75 and blocks < sms and m > 8:
        return m <= 64
    if quarter:
        return m <= (32 if (k < n or sm80 or sm90) else 23)
    return blocks * 2 <= sms and m <= 16


def _few_rows(device: KernelDevice, m: int, n: int, k: int, blocks: int) -> bool:
    """5 to 7 rows: fused, but for a few shapes on HBM cards."""
    major, minor = device.capability
    sms, sm80, sm90 = device.multiprocessors, (major, minor) == (8, 0), major == 9
    if (sm80 or sm90) and m >= 6 and blocks >= (36 if sm90 else 48):
        below_75 = blocks * 4 < sms * 3
        below_60 = blocks * 5 < sms * 3
        if k > n and below_75:
            return False
        if k == n and ((sm80 and below_60) or (sm90 and below_75 and not below_60)):
            return False
    return True


def _large_weight(device: KernelDevice, m: int, n: int, k: int, blocks: int) -> bool:
    """8 to 512 rows on weights of at least 4 Mi elements."""
    major, minor = device.capability
    sms = device.multiprocessors
    if (major, minor) == (7, 5):
        if blocks >= sms * 3:
            return m <= (128 if k < n else 64)
        return m <= (64 if blocks >= sms // 2 else 32)
    if (major, minor) == (8, 0):
        if blocks >= sms * 3:
            return m <= 128
        if blocks >= sms:
            return m <= (64 if k < n else 32)
        if (k >= n * 3 and blocks * 4 > sms) or (k == n and blocks >= 48 and blocks * 5 < sms * 3):
            return False
        if blocks * 2 < sms:
            if k <= n:
                return m <= 128
            if blocks * 3 >= sms:
                return False
        return m <= (128 if blocks >= sms // 2 and k < n else 16)
    if (major, minor) == (8, 6):
        return m <= (128 if blocks >= sms else 64 if blocks >= sms // 2 else 16)
    if major == 9:
        for waves, most in ((3, 64), (2, 48), (1, 32)):
            if blocks >= sms * waves:
                return m <= most
        return blocks >= sms // 2 and not (k >= n and blocks * 4 < sms * 3) and m <= 16
    if blocks >= sms * 3:
        return m <= 256
    if blocks >= sms * 2:
        return m <= 128
    tall = k > n * 2
    if blocks * 5 >= sms * 4:
        if tall or blocks >= 200:
            return m <= 128
        return m <= ((128 if sms >= 60 else 32) if k >= n else 64)
    if blocks >= sms // 2:
        return m <= (64 if tall else 8 if blocks >= 64 else 32)
    if k > n and blocks <= 48:
        return m <= (12 if k >= n * 3 else 10)
    return m <= (16 if (tall or blocks < 48) else 8)


def attention_kernel(device: KernelDevice, requested: str, width: int, shared_heads: bool, head_dim: int) -> str:
    """The kernel ``scaled_dot_product_attention`` (or the model) runs without a padding mask.

    ``requested`` is ``sdpa``, ``eager`` or ``flash``; ``width`` the bytes of q, k and v. Returns ``eager``,
    ``efficient``, ``math``, ``cudnn`` or ``flash``.
    """
    if requested == "eager":
        return "eager"
    if requested == "flash":
        return "flash"
    major = device.capability[0]
    if width == 2 and major >= 8 and head_dim <= 256:
        return "cudnn" if major >= 9 and head_dim <= 128 else "flash"
    return "math" if shared_heads else "efficient"


def efficient_backward_workspace(device: KernelDevice, batch_heads: int, sequence: int, head_dim: int) -> int:
    """Bytes of the fp32 tiles in which the memory-efficient kernel sums the gradient of q.

    PyTorch ``transformers/cuda/mem_eff_attention``: tiles of ``block`` × 64 numbers and 16 bytes; heads wider than 64
    get the kernel with 128 rows where the card has the shared memory for it (``kernels/generate_kernels.py``).
    """
    block = 128 if head_dim > 64 and device.capability in ((8, 0), (9, 0), (10, 0)) else 64
    return batch_heads * -(-sequence // block) * -(-head_dim // 64) * (block * 64 + 4) * 4


def fused_backward_workspace(query_elements: int, rows: int, width: int, shared_heads: bool) -> int:
    """Bytes of cuDNN's and flash attention's backward: an fp32 gradient of q and one number a row.

    With shared heads also dK and dV at the full head count. ``width`` is that of q, in bytes.
    """
    return 4 * query_elements + 4 * rows + 256 + (2 * query_elements * width if shared_heads else 0)
