"""The shape engine over all steps of a run of varying lengths, one after the other: the slow oracle of forecasts."""

from __future__ import annotations

import gc
from dataclasses import replace

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.decoder import Decoder
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.engine.load import Loader
from memtrace.estimate.engine.loss import Head
from memtrace.estimate.engine.ops import Ops
from memtrace.estimate.engine.optimizer import Optimizer
from memtrace.estimate.engine.step import backward_pass, batch_of, forward_pass
from memtrace.estimate.forecast import RunPlan
from memtrace.estimate.source import ShapeSource
from memtrace.estimate.stream import Stream, Tape


def long_run(plan: RunPlan, device: KernelDevice) -> tuple[Stream, list[int]]:
    """The stream of loading and all steps, and the event at which each step begins."""
    assert isinstance(plan.source, ShapeSource)
    shape, options = plan.source.shape, plan.options
    gc.disable()
    try:
        tape = Tape()
        ops = Ops(tape, device.cublas_workspace_bytes, device.cublaslt_workspace_bytes, options.autocast)
        tape.mark("load")
        weights = Loader(ops, shape, options, device).load()
        optimizer = Optimizer(ops, options.optimizer, weights.parameters)
        starts = []
        masked = any(batch.padded for batches in plan.steps for batch in batches)
        token_ids = result = None
        for step, batches in enumerate(plan.steps):
            tape.step, tape.default_label, tape.site, tape.layer = step, Purpose.FORWARD, "", -1
            starts.append(len(tape.events))
            for batch in batches:
                here = replace(options, batch=batch.rows, sequence=batch.length, padded=batch.padded, masked=masked)
                tape.mark("inputs")
                token_ids = batch_of(ops, here)
                decoder = Decoder(ops, shape, here, device, weights)
                result = forward_pass(ops, decoder, Head(ops, shape, here, weights.head), here.keep_logits)
                backward_pass(ops, result[0])
                if not options.hold_loss:
                    result = None
            tape.mark("optimizer")
            optimizer.step()
            tape.mark("zero_grad")
            optimizer.zero_grad()
            result = None
        tape.mark("end")
        stream = tape.stream(optimizer.managed_bytes, decoder.kernel)
        del token_ids, result
        return stream, starts
    finally:
        gc.enable()
