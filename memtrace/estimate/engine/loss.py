"""The head and the loss: full logits, chunks of tokens under checkpointing, or TRL's fused head on tiles.

Mirrors ``loss_utils.py`` (Transformers 5.17) and ``ChunkedLogProbFunction`` of TRL ≥ 1.
"""

from __future__ import annotations

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.autograd import Grads, Storage, Tensor
from memtrace.estimate.engine.ops import Ops
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape

TILE_TOKENS = 4096  # TRL: tokens a tile
TILE_COLUMNS = 32768  # TRL: vocabulary entries a tile


class Head:
    """Projects the last hidden state on the vocabulary and takes the loss."""

    def __init__(self, ops: Ops, shape: ModelShape, options: RunOptions, weight: Tensor) -> None:
        self.ops = ops
        self.shape = shape
        self.options = options
        self.weight = weight

    def loss(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """The loss, and the logits where the caller gets them."""
        self.ops.tape.site = "lm_head"
        if self.options.loss == "fused":
            return self._fused(hidden_states), None
        if self.options.loss == "chunked":
            return self._chunked(hidden_states), None
        logits = self._logits(hidden_states)
        self.ops.tape.site = "loss"
        return self._causal_lm_loss(logits), logits

    # ---- full logits --------------------------------------------------------------------------------------------
    def _logits(self, hidden_states: Tensor) -> Tensor:
        ops = self.ops
        logits = ops.linear(self.weight, hidden_states, self.shape.vocabulary, Purpose.LOGITS)
        if self.shape.logit_softcap:
            logits = ops.scale(logits, "div")
            logits = ops.tanh(logits)
            logits = ops.scale(logits)
        return logits

    def _causal_lm_loss(self, logits: Tensor) -> Tensor:
        """``ForCausalLMLoss``: float logits, shifted labels, cross entropy."""
        ops, options = self.ops, self.options
        logits = ops.to(logits, 4, Purpose.LOGITS)
        labels = ops.new(options.batch * (options.sequence + 1), 8, "pad")
        shift_labels = ops.new(options.tokens, 8, "contiguous") if options.batch > 1 else labels
        return self._cross_entropy(logits, shift_labels)

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """``log_softmax`` (result saved), then ``nll_loss``."""
        ops, elements = self.ops, logits.elements
        node = ops.node(logits)
        log_probabilities = ops.new(elements, 4, "log_softmax", Purpose.LOSS)
        if node is not None:
            ops.save(node, log_probabilities)
            ops.attach(
                log_probabilities,
                node,
                lambda _grad, _saved: (ops.new(elements, 4, "log_softmax_backward", Purpose.LOSS),),
            )
        node = ops.node(log_probabilities)
        loss = ops.new(1, 4, "nll_loss")
        total_weight = ops.new(1, 4, "nll_loss")
        if node is not None:
            for tensor in (log_probabilities, labels, total_weight):
                ops.save(node, tensor)
            ops.attach(loss, node, lambda _grad, _saved: (ops.new(elements, 4, "nll_loss_backward", Purpose.LOSS),))
        return loss

    # ---- chunks of tokens ---------------------------------------------------------------------------------------
    def _chunked(self, hidden_states: Tensor) -> Tensor:
        """Logits and loss of ``chunk_tokens`` tokens at a time, each chunk checkpointed; the sum of their losses."""
        ops, options = self.ops, self.options
        labels = ops.new(options.batch * (options.sequence + 1), 8, "pad")
        labels = ops.new(options.tokens, 8, "reshape") if options.batch > 1 else labels
        total: Tensor | None = None
        starts, width = range(0, options.tokens, options.chunk_tokens), hidden_states.elements // options.tokens
        parts = [min(options.tokens - start, options.chunk_tokens) * width for start in starts]
        for chunk in ops.split(hidden_states, parts):
            loss = ops.checkpoint(
                lambda x: self._cross_entropy(ops.to(self._logits(x), 4, Purpose.LOGITS), labels), chunk
            )
            total = loss if total is None else ops.add(total, loss)
        assert total is not None
        return ops.scale(total, "div")

    # ---- TRL's fused head ---------------------------------------------------------------------------------------
    def _fused(self, hidden_states: Tensor) -> Tensor:
        """Scored tokens are gathered; tiles of logits are folded into running statistics, and recomputed backward."""
        ops, options = self.ops, self.options
        scored = options.batch * (options.sequence - 1)
        mask = ops.new(scored, 1, "ne")
        gathered = self._gather(hidden_states, scored, mask)
        targets = ops.new(scored, 8, "index")
        log_probabilities = self._tiles(gathered, targets, scored)
        del gathered, targets
        node = ops.node(log_probabilities)
        per_token = ops.new(scored, 4, "masked_scatter")
        loss = ops.new(1, 4, "sum")
        if node is not None:
            ops.save(node, mask)
            ops.attach(loss, node, lambda _grad, _saved: (ops.new(scored, 4, "masked_scatter_backward"),))
        del per_token
        return loss

    def _gather(self, hidden_states: Tensor, scored: int, mask: Tensor) -> Tensor:
        """``hidden_states[:, :-1][mask]``: a copy; backward scatters into zeros of the slice, then of the whole."""
        ops, width, hidden = self.ops, hidden_states.width, self.shape.hidden
        node = ops.node(hidden_states)
        if node is not None:
            ops.save(node, mask)
        indices = [ops.new(scored, 8, "nonzero"), ops.new(scored, 8, "nonzero")]
        out = ops.new(scored * hidden, width, "index")
        del indices
        if node is not None:
            elements = hidden_states.elements

            def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
                scattered = ops.new(scored * hidden, width, "index_backward")
                whole = ops.new(elements, width, "slice_backward")
                del scattered
                return (whole,)

            ops.attach(out, node, backward)
        return out

    def _tiles(self, gathered: Tensor, targets: Tensor, scored: int) -> Tensor:
        """``ChunkedLogProbFunction``: six running statistics, one tile, then log-probability and entropy a token."""
        ops, hidden, vocabulary = self.ops, self.shape.hidden, self.shape.vocabulary
        compute = 2 if ops.autocast else gathered.width
        tile_elements = min(scored, TILE_TOKENS) * TILE_COLUMNS
        columns = min(TILE_COLUMNS, vocabulary)
        casts_head, casts_hidden = self.weight.width != compute, gathered.width != compute
        node = ops.node(gathered)
        statistics = [ops.new(scored, 4, "full") for _ in range(6)]
        tile = ops.new(tile_elements, compute, "mm", Purpose.LOGITS)
        self._fill_tile(casts_hidden, casts_head, columns, compute, scored)
        log_z = ops.add_number(ops.new(scored, 4, "log"))
        out = ops.new(scored, 4, "sub")
        ratio = ops.new(scored, 4, "div")
        entropy = ops.new(scored, 4, "sub")
        del ratio, tile, statistics
        if node is not None:
            for tensor in (gathered, targets, log_z, entropy):
                ops.save(node, tensor)
            elements, width = gathered.elements, gathered.width

            def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
                of_hidden = ops.new(scored * hidden, 4, "zeros", Purpose.LOSS)
                tile = ops.new(tile_elements, compute, "mm", Purpose.LOSS)
                self._fill_tile(casts_hidden, casts_head, columns, compute, scored)
                result = of_hidden if width == 4 else ops.new(elements, width, "to")
                del tile, of_hidden
                return (result,)

            ops.attach(out, node, backward)
        return out

    def _fill_tile(self, casts_hidden: bool, casts_head: bool, columns: int, compute: int, scored: int) -> None:
        """Copies that a tile's product needs where types differ (autocast on an fp32 stream)."""
        ops, hidden = self.ops, self.shape.hidden
        chunk = ops.new(min(scored, TILE_TOKENS) * hidden, compute, "to") if casts_hidden else None
        rows = ops.new(columns * hidden, compute, "to") if casts_head else None
        ops.workspace()
        del rows, chunk
