"""A whole predicted run: load, then steps of forward, backward, optimizer and zero_grad."""

from __future__ import annotations

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.autograd import Tensor
from memtrace.estimate.engine.decoder import Decoder
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.engine.load import Loader
from memtrace.estimate.engine.loss import Head
from memtrace.estimate.engine.ops import Ops
from memtrace.estimate.engine.optimizer import Optimizer
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.stream import MICRO_BATCHES, Stream, Tape, uncollected


@uncollected()
def simulate_run(shape: ModelShape, options: RunOptions, device: KernelDevice, steps: int = 2) -> Stream:
    """The stream of loading the model and training ``steps`` steps, each of MICRO_BATCHES at most."""
    tape = Tape()
    ops = Ops(tape, device.cublas_workspace_bytes, device.cublaslt_workspace_bytes, options.autocast)
    tape.mark("load")
    weights = Loader(ops, shape, options, device).load()
    decoder = Decoder(ops, shape, options, device, weights)
    head = Head(ops, shape, options, weights.head)
    optimizer = Optimizer(ops, options.optimizer, weights.parameters)
    token_ids: list[Tensor] = []
    result: tuple[Tensor, Tensor | None] | None = None
    for step in range(steps):
        tape.step, tape.default_label, tape.site, tape.layer = step, Purpose.FORWARD, "", -1
        for _ in range(min(options.accumulation, MICRO_BATCHES)):
            tape.mark("inputs")
            token_ids = batch_of(ops, options)  # the old ones die after
            result = forward_pass(ops, decoder, head, options.keep_logits)
            backward_pass(ops, result[0])
            if not options.hold_loss:
                result = None
        tape.mark("optimizer")
        if options.clips:
            optimizer.clip()
        optimizer.step()
        tape.mark("zero_grad")
        optimizer.zero_grad()
        result = None
    if options.evaluates:
        evaluation_pass(ops, decoder, head)
    tape.mark("end")
    assert weights.layers and token_ids  # what lives is alive to the end
    return tape.stream(optimizer.managed_bytes, decoder.kernel)


def forward_pass(ops: Ops, decoder: Decoder, head: Head, keep_logits: bool) -> tuple[Tensor, Tensor | None]:
    """Forward and loss; the logits only if the caller keeps them."""
    tape = ops.tape
    tape.mark("forward")
    start = len(tape.events)
    hidden_states = decoder.forward()
    tape.mark("loss")
    loss, logits = head.loss(hidden_states)
    del hidden_states
    if ops.autocast:
        ops.end_autocast()
    tape.site = ""
    if not keep_logits:
        logits = None
    tape.relabel_since(start, Purpose.SAVED)
    return loss, logits


def batch_of(ops: Ops, options: RunOptions) -> list[Tensor]:
    """What comes in: token ids, and where rows are padded which of them count."""
    names = ("token_ids", "attention_mask") if options.masked or options.padded else ("token_ids",)
    return [ops.new(options.tokens, 8, name, Purpose.OTHER) for name in names]


def evaluation_pass(ops: Ops, decoder: Decoder, head: Head) -> None:
    """A batch without gradients, dropout and checkpoints, of which nothing stays."""
    tape = ops.tape
    tape.mark("eval")
    tape.mark("inputs")
    batch = batch_of(ops, decoder.options)
    tape.mark("evaluation")
    before = ops.grad_enabled, decoder.training, tape.default_label
    ops.grad_enabled, decoder.training, tape.default_label = False, False, Purpose.FORWARD
    loss, logits = head.loss(decoder.forward())
    ops.end_autocast()
    ops.grad_enabled, decoder.training, tape.default_label = before
    tape.site = ""
    del loss, logits, batch


def backward_pass(ops: Ops, loss: Tensor) -> None:
    """``loss.backward()``."""
    ops.tape.mark("backward")
    ones = ops.new(1, 4, "ones_like", Purpose.BACKWARD)
    ops.backward(loss, ones)
    del ones
