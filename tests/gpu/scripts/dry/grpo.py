"""TRL's GRPO with a reward of one's own on a two-layer Qwen2."""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

v = {w: i for i, w in enumerate(["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", *[f"w{i}" for i in range(300)]])}
t = Tokenizer(models.WordLevel(v, unk_token="<pad>"))
t.pre_tokenizer = pre_tokenizers.Whitespace()
tok = PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="<eos>")
m = Qwen2ForCausalLM(
    Qwen2Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(v),
    )
)
ds = Dataset.from_dict({"prompt": ["a b c w1 w2", "d e f w7"] * 8})


def reward(completions, **k):
    return [float(len(set(c.split()))) for c in completions]


tr = GRPOTrainer(
    m,
    reward_funcs=reward,
    args=GRPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=24,
        max_steps=3,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
    ),
    train_dataset=ds,
    processing_class=tok,
)
tr.train()
