"""Train a published model from random weights: MODEL OPTIMIZER BATCH SIZE ZERO_GRAD PRECISION.

SIZE: pixels of an image or tokens of a text. ZERO_GRAD: first or last in the step. PRECISION: float32 or bfloat16.
"""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

VISION = (
    "vgg16", "vgg19", "resnet101", "resnet152", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large",
    "mnasnet1_0", "regnet_x_400mf", "regnet_y_400mf", "convnext_tiny", "convnext_base",
)  # fmt: skip
TEXT = {
    "distilgpt2": ("GPT2", {"n_layer": 6}),
    "gpt2": ("GPT2", {}),
    "cerebras-gpt-111m": ("GPT2", {"n_layer": 10, "n_positions": 2048, "activation_function": "gelu"}),
    "gpt-neo-125m": (
        "GPTNeo",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "opt-125m": ("OPT", {}),
    "opt-350m": (
        "OPT",
        {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16,
         "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    "pythia-410m": (
        "GPTNeoX",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
         "vocab_size": 50304},
    ),
    "t5-small": ("T5", {"decoder_start_token_id": 0}),
    "t5-base": ("T5", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}),
    "qwen3-0.6b": (
        "Qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def text_model(name):
    import transformers

    family, changes = TEXT[name]
    config = getattr(transformers, f"{family}Config")(**changes)
    head = "ForConditionalGeneration" if family == "T5" else "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{family}{head}")(config)


def optimizer_of(name, parameters):
    if name == "Adafactor":
        from transformers import Adafactor

        return Adafactor(parameters)
    return getattr(torch.optim, name)(parameters, lr=1e-4)


def main():
    name, optimizer_name, batch, size, zero_grad, precision = sys.argv[1:7]
    batch, size, steps = int(batch), int(size), 3
    if name in TEXT:
        model = text_model(name)
        data = TensorDataset(torch.randint(0, 30000, (batch * steps, size)))
    else:
        import torchvision

        model = getattr(torchvision.models, name)(num_classes=100)
        data = TensorDataset(torch.randn(batch * steps, 3, size, size), torch.randint(0, 100, (batch * steps,)))
    model = model.to("cuda").train()
    optimizer = optimizer_of(optimizer_name, model.parameters())
    criterion = torch.nn.CrossEntropyLoss()
    for values in DataLoader(data, batch_size=batch):
        if zero_grad == "first":
            optimizer.zero_grad()
        values = [value.to("cuda") for value in values]
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            if name in TEXT:
                loss = model(input_ids=values[0], labels=values[0]).loss
            else:
                loss = criterion(model(values[0]), values[1])
        if zero_grad == "last":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


if __name__ == "__main__":
    main()
