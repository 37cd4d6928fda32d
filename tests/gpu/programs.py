"""The programs that ``record_truth.py`` records, one generator function a kind of training or inference.

What stands before a program's ``yield`` loads or builds its model; recordings that start late begin there. A program
marks its phases and names what it trains; it knows nothing of memtrace. ``stage.surprise()`` is where the second,
larger batch comes that runs out of memory in the recordings that are to show that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from memtrace.record import qlora


class Stage(Protocol):
    """What ``record_truth.py`` hands a program."""

    device: str
    checkpoint: Path
    scratch: Path
    small: bool
    cfg: qlora.StepConfig
    options: dict[str, Any]

    def mark(self, name: str) -> None:
        """A phase begins: load, adapters, ready, forward, backward, optimizer, zero_grad, eval, between, end."""

    def know(self, model: Any, *optimizers: Any, states: Callable[[], list[Any]] | None = None) -> None:
        """Name the model, the optimizers, and what gives the states of an optimizer of the program's own."""

    def follow(self, model: Any) -> None:
        """Mark a model's passes where another's loop calls it, and note its key/value caches."""

    def surprise(self) -> bool:
        """Whether the next batch is to be four times as large; the memory limit is lowered to the peak so far then."""


def _ids(stage: Stage, batch: int, length: int, seed: int, vocab: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (batch, length), generator=generator).to(stage.device)


def _shape(stage: Stage, batch: int, length: int) -> tuple[int, int]:
    return (2, 32) if stage.small else (batch, length)


def _pretrained(stage: Stage, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    given = {"device_map": {"": stage.device}, "dtype": torch.bfloat16} | options
    return AutoModelForCausalLM.from_pretrained(stage.checkpoint, **given)


def _train(stage: Stage, model: Any, optimizer: Any, batch: int, length: int, steps: int = 3) -> None:
    """An ordinary loop over a language model of Transformers."""
    batch, length = _shape(stage, batch, length)
    vocab = qlora.vocabulary(model)
    model.train()
    for step in range(steps):
        rows = 4 * batch if step == steps - 1 and stage.surprise() else batch
        ids = _ids(stage, rows, length, step, vocab)
        stage.mark("forward")
        loss = model(input_ids=ids, labels=ids).loss
        stage.mark("backward")
        loss.backward()
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
    stage.mark("end")


# the run that memtrace builds itself
def plain(stage: Stage) -> Iterator[None]:
    """``memtrace.record.qlora`` as it stands: NF4 with double quantisation and LoRA unless the step says otherwise."""
    base = qlora.load_base(stage.checkpoint, stage.cfg, stage.device)
    stage.mark("adapters")
    torch.manual_seed(1)
    model = qlora.add_adapters(base, stage.cfg)
    del base
    optimizer = qlora.make_optimizer(model, stage.cfg)
    stage.know(model, optimizer)
    yield
    qlora.run_loop(model, optimizer, stage.cfg, stage.device, stage.mark, lambda: None)


def trainer(stage: Stage) -> Iterator[None]:
    """The same model through Transformers' or TRL's trainer; ``eval_batches``: evaluated after every step."""
    base = qlora.load_base(stage.checkpoint, stage.cfg, stage.device)
    stage.mark("adapters")
    torch.manual_seed(1)
    model = qlora.add_adapters(base, stage.cfg)
    del base
    stage.know(model)
    yield
    stage.follow(model)
    cfg = stage.cfg
    rows = _ids(stage, cfg.steps * cfg.batch * cfg.accumulate, cfg.seq_len, 0, qlora.vocabulary(model)).tolist()
    options: dict[str, Any] = {
        "output_dir": str(stage.scratch / "trainer"), "per_device_train_batch_size": cfg.batch, "max_steps": cfg.steps,
        "gradient_accumulation_steps": cfg.accumulate, "bf16": cfg.autocast, "optim": cfg.optim, "report_to": [],
        "save_strategy": "no", "logging_strategy": "no", "use_cpu": stage.small, "dataloader_pin_memory": False,
        "gradient_checkpointing": cfg.checkpointing, "disable_tqdm": True,
    }  # fmt: skip
    if cfg.eval_batches:
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": cfg.batch}
    if stage.options["trainer"] == "trl":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data: Any = Dataset.from_list([{"input_ids": ids} for ids in rows])
        args = SFTConfig(
            **options, max_length=cfg.seq_len, packing=False, dataset_kwargs={"skip_prepare_dataset": True}
        )
        made = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=_tokenizer())
    else:
        from transformers import Trainer, TrainingArguments

        data = [{"input_ids": ids, "labels": ids} for ids in rows]
        train: Any = data
        if stage.options.get("oom"):  # the last batch is four times as long
            train = _InOrder([*data[: -cfg.batch], *({k: 4 * v for k, v in row.items()} for row in data[-cfg.batch :])])
        made = Trainer(
            model=model, args=TrainingArguments(**options), train_dataset=train, data_collator=_collate,
            eval_dataset=data[: cfg.batch * cfg.eval_batches] or None, callbacks=[_tightening(stage, cfg.steps)],
        )  # fmt: skip
    made.train()
    stage.mark("end")


class _InOrder(IterableDataset):  # type: ignore[type-arg]
    """Rows as they come, unshuffled."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def _tightening(stage: Stage, steps: int) -> Any:
    from transformers import TrainerCallback

    class Tighten(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == steps - 1:
                stage.surprise()

    return Tighten()


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


# adapters
def adapters(stage: Stage) -> Iterator[None]:
    """LoRA on a 16-, 8- or 4-bit base; ``lora`` holds what is special (``use_dora``, ``target_modules``)."""
    from peft import LoraConfig, get_peft_model

    options = dict(stage.options)
    base = qlora.load_base(stage.checkpoint, stage.cfg, stage.device)
    stage.mark("adapters")
    torch.manual_seed(1)
    if options.get("hooks"):
        from accelerate import dispatch_model

        base = dispatch_model(base, {"": stage.device}, force_hooks=True)
    base.config.use_cache = False
    if stage.cfg.checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    given = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**given | options.get("lora", {})))
    del base
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    stage.know(model, optimizer)
    yield
    _train(stage, model, optimizer, options.get("batch", 2), options.get("length", 768))


def caught(stage: Stage) -> Iterator[None]:
    """LoRA whose loop catches the error, halves its batch and goes on."""
    model = qlora.add_adapters(qlora.load_base(stage.checkpoint, stage.cfg, stage.device), stage.cfg)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    stage.know(model, optimizer)
    yield
    batch, length = _shape(stage, 2, 768)
    for step in range(3):
        rows = 4 * batch if step == 1 and stage.surprise() else batch
        while True:
            ids = _ids(stage, rows, length, step, qlora.vocabulary(model))
            try:
                stage.mark("forward")
                loss = model(input_ids=ids, labels=ids).loss
                stage.mark("backward")
                loss.backward()
                break
            except torch.OutOfMemoryError:
                rows //= 2
            optimizer.zero_grad()
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
        del loss
    stage.mark("end")


# full fine-tuning and pretraining
class HandAdamW:
    """AdamW as courses write it: moments in lists, in place or replaced at each step."""

    def __init__(self, parameters: list[Any], replaced: bool) -> None:
        self.parameters = parameters
        self.replaced = replaced
        self.first: list[Any] = [torch.zeros_like(p) for p in parameters]
        self.second: list[Any] = [torch.zeros_like(p) for p in parameters]
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            if self.replaced:
                self.first[i] = 0.9 * self.first[i] + 0.1 * p.grad
                self.second[i] = 0.95 * self.second[i] + 0.05 * p.grad * p.grad
            else:
                self.first[i].mul_(0.9).add_(p.grad, alpha=0.1)
                self.second[i].mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
            m = self.first[i] / (1 - 0.9**self.count)
            v = self.second[i] / (1 - 0.95**self.count)
            p.mul_(1 - 1e-5)
            p.sub_(1e-4 * m / (v.sqrt() + 1e-8))

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def own_adamw(stage: Stage) -> Iterator[None]:
    """Full fine-tuning with an optimizer written by hand."""
    model = _pretrained(stage)
    stage.mark("adapters")
    optimizer = HandAdamW(list(model.parameters()), stage.options.get("replaced", False))
    stage.know(model, states=lambda: [*optimizer.first, *optimizer.second])
    yield
    _train(stage, model, optimizer, 2, 512)


def adafactor(stage: Stage) -> Iterator[None]:
    """Full fine-tuning with Transformers' Adafactor: factored second moments."""
    from transformers.optimization import Adafactor

    model = _pretrained(stage)
    stage.mark("adapters")
    optimizer = Adafactor(model.parameters(), lr=1e-4, relative_step=False, scale_parameter=False)
    stage.know(model, optimizer)
    yield
    _train(stage, model, optimizer, 2, 512)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    """A GPT as courses write it."""

    def __init__(self, width: int, layers: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _gpt(stage: Stage) -> tuple[Gpt, int, int, int]:
    """(model, vocabulary, batch, length)."""
    if stage.small:
        return Gpt(64, 2, 2, 128, 128), 128, 2, 32
    return Gpt(1024, 4, 16, 50304, 1024), 50304, 4, 512


def muon(stage: Stage) -> Iterator[None]:
    """Pretraining from scratch: Muon for the matrices, AdamW for the rest, autocast."""
    model, vocab, batch, length = _gpt(stage)
    model.to(stage.device)
    stage.mark("adapters")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or not name.startswith("blocks")]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-4)]
    stage.know(model, *optimizers)
    yield
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        ids = _ids(stage, rows, length, step, vocab)
        stage.mark("forward")
        with torch.autocast(stage.device.partition(":")[0], dtype=torch.bfloat16):
            logits = model(ids)
            loss = functional.cross_entropy(logits[:, :-1].reshape(-1, vocab), ids[:, 1:].reshape(-1))
        del logits
        stage.mark("backward")
        loss.backward()
        stage.mark("optimizer")
        for optimizer in optimizers:
            optimizer.step()
        stage.mark("zero_grad")
        for optimizer in optimizers:
            optimizer.zero_grad()
    stage.mark("end")


def lightning(stage: Stage) -> Iterator[None]:
    """Lightning's Trainer: forward and backward run in the optimizer's closure; validation after every epoch."""
    import logging

    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, vocab, batch, length = _gpt(stage)

    class Lesson(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, ids: Any, number: int) -> Any:
            return self.lost(ids)

        def validation_step(self, ids: Any, number: int) -> None:
            self.log("val", self.lost(ids))

        def lost(self, ids: Any) -> Any:
            stage.mark("forward" if torch.is_grad_enabled() else "eval")
            logits = self.model(ids)
            return functional.cross_entropy(logits[:, :-1].reshape(-1, vocab), ids[:, 1:].reshape(-1))

        def on_before_backward(self, loss: Any) -> None:
            stage.mark("backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            stage.mark("optimizer")

        def on_train_batch_start(self, rows: Any, number: int) -> None:
            stage.mark("zero_grad")

        def on_train_batch_end(self, output: Any, rows: Any, number: int) -> None:
            stage.mark("zero_grad")

        def on_validation_batch_end(self, output: Any, rows: Any, number: int) -> None:
            stage.mark("between")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
            stage.know(model, optimizer)
            return optimizer

    model.to(stage.device)
    stage.mark("adapters")
    stage.know(model)
    yield
    rows = [_ids(stage, 4 * batch if step == 2 and stage.options.get("oom") else batch, length, step, vocab).cpu()
            for step in range(3)]  # fmt: skip

    class Loader(DataLoader):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for number, ids in enumerate(rows):
                if number == 2:
                    stage.surprise()
                yield ids

    fit = Trainer(
        accelerator="cpu" if stage.small else "gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1, default_root_dir=stage.scratch,
        precision="bf16-mixed",
    )  # fmt: skip
    fit.fit(Lesson(), Loader(rows, batch_size=None), DataLoader(rows[:1], batch_size=None))
    stage.mark("end")


# diffusion
class Residual(nn.Module):
    """Two convolutions with the time's embedding between."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, inside), nn.GroupNorm(8, outside)
        self.one = nn.Conv2d(inside, outside, 3, padding=1)
        self.two = nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Any, time: Any) -> Any:
        h = self.one(functional.silu(self.first(x)))
        h = h + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.two(functional.silu(self.second(h)))


class Attention(nn.Module):
    """Attention over pixels, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Any) -> Any:
        batch, width, high, wide = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, width, high * wide).unbind(1)
        weight = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(width), dim=-1)
        return x + self.out((v @ weight.transpose(1, 2)).view(batch, width, high, wide))


class UNet(nn.Module):
    """A small convolutional U-Net that predicts noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes, time = (width, 2 * width, 4 * width), 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        pairs = list(zip((width, *sizes), sizes, strict=False))
        self.down = nn.ModuleList([Residual(a, b, time) for a, b in pairs])
        self.shrink = nn.ModuleList([nn.Conv2d(b, b, 3, stride=2, padding=1) for _, b in pairs])
        self.middle = nn.ModuleList([Residual(sizes[-1], sizes[-1], time), Residual(sizes[-1], sizes[-1], time)])
        self.attention = Attention(sizes[-1])
        self.up = nn.ModuleList([Residual(2 * b, a, time) for a, b in reversed(pairs)])
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Any, when: Any) -> Any:
        steps = torch.exp(-math.log(1e4) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = when[:, None].float() * steps[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x, kept = self.enter(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            kept.append(x)
            x = shrink(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, kept.pop()], dim=1), time)
        return self.leave(x)


def diffusion(stage: Stage) -> Iterator[None]:
    """A convolutional U-Net trained to predict noise; sampled without gradients at the end."""
    width, pixels, batch = (16, 16, 2) if stage.small else (128, 64, 16)
    model = UNet(width).to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stage.know(model, optimizer)
    yield
    kind = stage.device.partition(":")[0]
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        generator = torch.Generator().manual_seed(step)
        images = torch.rand((rows, 3, pixels, pixels), generator=generator).to(stage.device)
        when = torch.randint(0, 1000, (rows,), generator=generator).to(stage.device)
        noise = torch.randn_like(images)
        share = (when / 1000.0).view(-1, 1, 1, 1)
        noisy = images * (1 - share) + noise * share
        stage.mark("forward")
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss = functional.mse_loss(model(noisy, when), noise)
        stage.mark("backward")
        loss.backward()
        stage.mark("optimizer")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
    sample = torch.randn((batch, 3, pixels, pixels)).to(stage.device)
    with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16):
        for step in (999, 500):
            stage.mark("eval")
            sample = sample - 0.1 * model(sample, torch.full((batch,), step, device=stage.device))
            stage.mark("between")
    stage.mark("end")


class ConvBlock(nn.Module):
    """Convolution and batch norm, with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Any) -> Any:
        return (x + self.second(self.two(self.first(self.one(x)).relu()))).relu()


def convnet(stage: Stage) -> Iterator[None]:
    """An image classifier in float32: batch norm, SGD with momentum, evaluated after every step."""
    width, pixels, batch = (8, 16, 2) if stage.small else (128, 56, 32)
    blocks = [ConvBlock(width) for _ in range(4)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head).to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    stage.know(model, optimizer)
    yield
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        images = torch.rand((rows, 3, pixels, pixels)).to(stage.device)
        kinds = torch.randint(0, 1000, (rows,)).to(stage.device)
        stage.mark("forward")
        loss = functional.cross_entropy(model(images), kinds)
        stage.mark("backward")
        loss.backward()
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
        stage.mark("eval")
        with torch.no_grad():
            model.eval()(images).argmax(-1).eq(kinds).float().mean()
        model.train()
        stage.mark("between")
    stage.mark("end")


def adversarial(stage: Stage) -> Iterator[None]:
    """A GAN: two models and two optimizers take turns; the generator's loss goes through the other's frozen weights."""
    width, pixels, batch = (8, 16, 2) if stage.small else (128, 64, 16)
    maker = nn.Sequential(
        nn.Conv2d(16, width, 3, padding=1), ConvBlock(width), ConvBlock(width), nn.Conv2d(width, 3, 1)
    )
    judge = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), ConvBlock(width), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    judge.append(nn.Linear(width, 1))
    both = nn.ModuleList([maker, judge]).to(stage.device)
    stage.mark("adapters")
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-4) for net in (maker, judge)]
    stage.know(both, *optimizers)
    yield
    for step in range(4):
        rows = 4 * batch if step == 3 and stage.surprise() else batch
        noise = torch.randn((rows, 16, pixels, pixels)).to(stage.device)
        real = torch.rand((rows, 3, pixels, pixels)).to(stage.device)
        for turn, optimizer in enumerate(optimizers):
            judge.requires_grad_(turn == 1)
            stage.mark("forward")
            if turn == 0:
                loss = functional.softplus(-judge(maker(noise))).mean()
            else:
                with torch.no_grad():
                    made = maker(noise)
                loss = functional.softplus(judge(made)).mean() + functional.softplus(-judge(real)).mean()
                del made
            stage.mark("backward")
            loss.backward()
            stage.mark("optimizer")
            optimizer.step()
            stage.mark("zero_grad")
            optimizer.zero_grad()
            del loss
    stage.mark("end")


def closure(stage: Stage) -> Iterator[None]:
    """``optimizer.step(closure)`` as LBFGS wants it, here with RMSprop: forward and backward run within the step."""
    model, vocab, batch, length = _gpt(stage)
    model.to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
    stage.know(model, optimizer)
    yield
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        ids = _ids(stage, rows, length, step, vocab)

        def lost(ids: Any = ids) -> Any:
            optimizer.zero_grad()
            stage.mark("forward")
            logits = model(ids)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            stage.mark("backward")
            loss.backward()
            stage.mark("optimizer")
            return loss.detach()

        optimizer.step(lost)
        stage.mark("zero_grad")
    stage.mark("end")


def rollout(stage: Stage) -> Iterator[None]:
    """Reinforcement learning: answers are generated with a cache, then LoRA is trained on them."""
    model = qlora.add_adapters(qlora.load_base(stage.checkpoint, stage.cfg, stage.device), stage.cfg)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    stage.know(model, optimizer)
    yield
    causal = model.get_base_model()
    stage.follow(causal)
    batch, length = _shape(stage, 4, 256)
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        ids = _ids(stage, rows, length, step, qlora.vocabulary(model))
        model.eval()
        options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
        options |= {"pad_token_id": 0, "disable_compile": True}
        with torch.no_grad():
            answers = causal.generate(ids, attention_mask=torch.ones_like(ids), **options)
        model.train()
        loss = model(input_ids=answers, labels=answers).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    stage.mark("end")


def interrupted(stage: Stage) -> Iterator[None]:
    """LoRA; somebody presses Ctrl-C within a forward pass, and the script dumps in ``finally``."""
    model = qlora.add_adapters(qlora.load_base(stage.checkpoint, stage.cfg, stage.device), stage.cfg)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    stage.know(model, optimizer)
    yield
    layers = model.get_base_model().model.layers

    def press(*_: Any) -> None:
        stage.mark("oom")  # what the labelling calls the end of a pass by an error
        raise KeyboardInterrupt

    batch, length = _shape(stage, 4, 768)
    for step in range(3):
        if step == 2:
            layers[-1].mlp.register_forward_pre_hook(press)
        ids = _ids(stage, batch, length, step, qlora.vocabulary(model))
        stage.mark("forward")
        loss = model(input_ids=ids, labels=ids).loss
        stage.mark("backward")
        loss.backward()
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()


# inference
def generation(stage: Stage) -> Iterator[None]:
    """``generate()`` with a key/value cache: ``cache`` is dynamic or static. Twice, the second time with more rows."""
    model = _pretrained(stage).eval()
    stage.know(model)
    yield
    stage.follow(model)
    batch, length, new = (2, 16, 4) if stage.small else (8, 512, 10)
    for call in range(2):
        rows = 4 * batch if call == 1 and stage.surprise() else batch
        ids = _ids(stage, rows, length, call, qlora.vocabulary(model))
        options: dict[str, Any] = {
            "max_new_tokens": new,
            "do_sample": False,
            "disable_compile": True,
            "pad_token_id": 0,
        }
        if stage.options.get("cache") == "static":
            options["cache_implementation"] = "static"
        model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, **options)
    stage.mark("end")


def offload(stage: Stage) -> Iterator[None]:
    """Big-model inference: half of the layers lie on the host or on disk; accelerate brings each in for its turn."""
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(stage.checkpoint).num_hidden_layers
    where = "disk" if stage.small else stage.options["where"]
    places: dict[str, Any] = {"model.embed_tokens": stage.device, "model.norm": stage.device, "lm_head": stage.device}
    places |= {"model.rotary_emb": stage.device}
    places |= {f"model.layers.{n}": stage.device if n < layers // 2 else where for n in range(layers)}
    model = _pretrained(stage, device_map=places, offload_folder=str(stage.scratch / "offload")).eval()
    stage.know(model)
    yield
    stage.follow(model)
    batch, length = _shape(stage, 4, 1024)
    with torch.no_grad():
        for call in range(3):
            rows = 4 * batch if call == 2 and stage.surprise() else batch
            ids = _ids(stage, rows, length, call, qlora.vocabulary(model))
            logits = model(input_ids=ids, use_cache=False).logits
            functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            del logits
    stage.mark("end")


PROGRAMS: dict[str, Callable[[Stage], Iterator[None]]] = {
    program.__name__: program
    for program in (
        *(plain, trainer, adapters, caught, interrupted, own_adamw, adafactor, muon, closure, lightning, rollout),
        *(diffusion, convnet, adversarial, generation, offload),
    )
}
