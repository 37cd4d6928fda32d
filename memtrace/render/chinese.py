"""OOM help in Chinese, beside the English: the verdict, what was found, what to change. All of it is in this file.

Sentences with the recording's own numbers stay English; figures, settings and finding ids are the same in both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from memtrace.explain.answer import Explanation
from memtrace.units import format_bytes

# verdict -> its name, what it says
VERDICTS: dict[str, tuple[str, str]] = {
    "fragmentation": ("显存碎片", "空闲显存足够，但都是零散的小块"),
    "budget": ("显存不足", "需要的显存超过了可用的总量"),
    "limit": ("受到限制", "本来放得下，但仍被拒绝"),
    "not_this_process": ("不是本进程", "显存被其他进程占用"),
    "not_gpu_memory": ("不是显存", "问题与 GPU 显存无关"),
    "not_pytorch": ("不是 PyTorch", "耗尽的不是 PyTorch 分配器的显存"),
    "no_oom": ("没有 OOM", "没有任何请求被拒绝"),
    "unknown": ("未知", "输入的信息不足以判断原因"),
}
CONFIDENCE = {"measured": "实测", "derived": "推算", "guess": "猜测"}
BASIS = {"replay": "重放验证", "forecast": "预测验证", "formula": "公式计算", "rule": "经验"}
PHASES = {
    "load": "加载模型", "forward": "前向传播", "backward": "反向传播", "optimizer": "优化器更新",
    "between": "两步之间", "evaluation": "评估", "generation": "生成", "unknown": "",
}  # fmt: skip

# finding -> what it is, what is usually done about it
FINDINGS: dict[str, tuple[str, str]] = {
    "attention_matrices": (
        "注意力矩阵随序列长度平方增长", "改用 sdpa 或 flash attention，或缩短序列"),
    "base_not_quantized": (
        "基座模型没有量化", "用 BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True) 加载"),
    "checkpointing_inactive": (
        "梯度检查点没有生效：所有层的激活都被保留", "打开 gradient_checkpointing，并确认它真的生效"),
    "cpp_only_stacks": (
        "调用栈里没有 Python 帧", "录制时用 stacks=\"all\" 或 \"python\""),
    "data_on_gpu": (
        "训练数据一直放在 GPU 上", "把数据留在 CPU，按批搬到 GPU"),
    "eval_batch_larger": (
        "评估的批次比训练的大", "减小 per_device_eval_batch_size"),
    "eval_peak": (
        "评估比训练更占显存", "减小评估批次，设置 prediction_loss_only 或 eval_accumulation_steps"),
    "experts_not_quantized": (
        "MoE 的专家权重没有量化", "选用会量化专家层的加载方式或已量化的模型"),
    "failure_while_reporting": (
        "第一次 OOM 之后，处理错误时又一次失败", "先看第一个 OOM；处理异常时不要再占用显存"),
    "fp32_lora_branch": (
        "LoRA 适配器以 32 位计算，并保留 32 位输入", "打开 bf16 自动混合精度，或把适配器转为 bf16"),
    "fp32_output_cast": (
        "模型输出被转换成 32 位", "不要让 accelerate 把 logits 转为 fp32，或分块计算损失"),
    "fp32_upcast_head": (
        "词嵌入和输出层是 32 位", "不调用 prepare_model_for_kbit_training，改用 bf16"),
    "gradient_buckets": (
        "梯度保存了两份：通信桶一份，梯度本身一份", "设置 gradient_as_bucket_view=True"),
    "gathered_weights": (
        "分片单元的权重被整体收集", "按解码层分片（fully_shard 或 auto_wrap_policy），用后立即释放"),
    "growth_across_steps": (
        "每一步都有显存没有释放", "不要把带计算图的张量存进列表；记录损失时用 loss.item()"),
    "kept_logits": (
        "反向传播时 logits 仍被保留", "在 loss.backward() 之前 del outputs, logits"),
    "kv_cache_in_training": (
        "训练时也在填充 KV 缓存", "设置 model.config.use_cache = False"),
    "late_recording": (
        "录制在模型加载之后才开始", "在加载模型之前开始录制"),
    "load_time_copies": (
        "只在加载模型时存在的副本", "直接按目标精度加载到 GPU，或先在 CPU 上加载"),
    "logits_unchunked": (
        "一次对整个词表计算 logits 和损失", "使用分块或融合的损失（如 use_liger_kernel=True）"),
    "offload_reloads": (
        "每次前向都从 CPU 或磁盘重新搬运权重", "模型放得下时不要用 offload"),
    "optimizer_full_precision": (
        "优化器状态是全精度的", "改用 paged_adamw_8bit"),
    "optimizer_on_first_step": (
        "优化器状态在第一步更新时才出现", "为优化器状态预留显存，或改用 8 位优化器"),
    "other_processes": (
        "其他进程占用了这块显卡的显存", "结束那些进程，或换一块显卡"),
    "output_hidden_states": (
        "保留了所有层的隐藏状态", "设置 output_hidden_states=False"),
    "outside_allocator": (
        "PyTorch 分配器之外的显存", "检查 CUDA 上下文、NCCL 和其他库占用的显存"),
    "padding_by_one_outlier": (
        "一个长序列使同批的其他序列被填充", "按长度分组（group_by_length），或不用填充（padding_free、packing）"),
    "metrics_on_gpu": (
        "指标把以前各步的张量留在 GPU 上", "compute_on_cpu=True，或用 preds.detach().cpu() 更新指标"),
    "padding_or_packing": (
        "这一批的 token 比平时多", "按长度分组、截断，或限制每批的 token 数"),
    "process_limit": (
        "耗尽的是本进程的限额，而不是显卡", "调高 set_per_process_memory_fraction 或容器的限额"),
    "reference_model_copy": (
        "基座模型有第二份副本", "用关闭适配器的同一模型作参考模型（如 TRL 的 ref_model=None）"),
    "reserved_in_pieces": (
        "已保留的显存被切成了小块", "设置 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    "retained_graph": (
        "上一次传播的计算图仍被持有", "不要使用 retain_graph=True，不要保留带计算图的损失"),
    "saving_gathers_weights": (
        "保存检查点时把权重收集到一块 GPU 上", "改为分片保存，或收集到 CPU"),
    "settings_without_effect": (
        "有分配器设置没有生效", "在 Python 启动之前设置 PYTORCH_CUDA_ALLOC_CONF"),
    "truncated_trace": (
        "录制的开头已经丢失", "调大 max_entries 重新录制"),
    "variable_length_fragmentation": (
        "长度不一的序列使显存碎片化", "设置 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True，或按长度分组"),
    "zero_on_one_gpu": (
        "单卡上 DeepSpeed ZeRO 不会分摊显存，反而多出一份副本", "单卡时不要使用 DeepSpeed"),
}  # fmt: skip


def wants_chinese(lang: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``--lang``, or else the environment as programs read it, asks for Chinese."""
    if lang is None:
        lang = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "")
    return lang.lower().startswith("zh")


def render_chinese(answer: Explanation, most: int | None = 3) -> Iterator[str]:
    """The verdict, and of at most ``most`` findings what they are and what is usually done about such a thing."""
    name, meaning = VERDICTS[answer.verdict]
    yield f"{name}（{CONFIDENCE[answer.confidence]}）：{meaning}{_when(answer)}"
    for finding in answer.findings[:most]:
        title, change = FINDINGS[finding.id]
        size = "" if finding.bytes is None else f"，{format_bytes(finding.bytes)}{'/步' if finding.per_step else ''}"
        yield f"  {title}（{finding.id}{size}）"
        for best in finding.advice[:1]:  # what fits this very run stands in the English text
            saves = best.saves_bytes
            saving = "" if saves is None else f"（英文中的改法可省 {format_bytes(saves)}，{BASIS[best.basis]}）"
            yield f"    → 一般做法：{change}{saving}"


def _when(answer: Explanation) -> str:
    if answer.when is None:
        return ""
    step = "" if answer.when.step is None else f"第 {answer.when.step} 步"
    parts = "，".join(filter(None, [PHASES[answer.when.phase], step]))
    return f" · {parts}" if parts else ""
