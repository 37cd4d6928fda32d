"""PyTorch's operators on byte counts: what each allocates, saves, and allocates in backward.

Every operator follows PyTorch's formula in ``derivatives.yaml`` and the order of the generated code: inputs are
saved before the output exists, results after it; gradients of later arguments are computed first.
"""

from __future__ import annotations

from collections.abc import Sequence

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.autograd import BackwardFunction, Engine, Grads, Storage, Tensor
from memtrace.estimate.stream import Tape


def passes_on(grad: Tensor, _saved: list[Storage]) -> Grads:
    """Backward of an operator whose gradient is the incoming one itself."""
    return (grad,)


class Ops(Engine):
    """The engine with operators. ``cublas_bytes`` is the workspace of one thread's handle."""

    def __init__(self, tape: Tape, cublas_bytes: int, cublaslt_bytes: int, autocast: bool = False) -> None:
        super().__init__(tape)
        self.autocast = autocast
        self._autocast_cache: dict[Tensor, Tensor] = {}
        self._workspace_bytes = {"cublas": cublas_bytes, "cublaslt": cublaslt_bytes}
        self._workspaces: dict[tuple[str, str], Tensor] = {}

    # ---- the frame of an operator -------------------------------------------------------------------------------
    def operator(
        self,
        inputs: Sequence[Tensor],
        elements: int,
        width: int,
        op: str,
        backward: BackwardFunction,
        *,
        saves: Sequence[Tensor] = (),
        saves_result: bool = False,
        label: str | None = None,
    ) -> Tensor:
        """One operator with one result. ``backward`` must hold no tensor: what it needs is saved, or a number."""
        node = self.node(*inputs)
        if node is not None:
            for tensor in saves:
                self.save(node, tensor)
        out = self.new(elements, width, op, label)
        if node is not None:
            if saves_result:
                self.save(node, out)
            self.attach(out, node, backward)
        return out

    def makes(self, elements: int, width: int, op: str, before: int = 0, after: int = 0) -> BackwardFunction:
        """A backward that makes one gradient; ``before`` temporaries live until it is there, ``after`` follow it."""

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            temporaries = [self.new(elements, width, op) for _ in range(before)]
            out = self.new(elements, width, op)
            while temporaries:
                temporaries.pop()
            for _ in range(after):
                self.new(elements, width, op)
            return (out,)

        return backward

    # ---- element by element -------------------------------------------------------------------------------------
    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """``a * b`` with broadcasting of the smaller one; both of one width."""
        elements, width = max(a.elements, b.elements), max(a.width, b.width)
        sizes, widths, wanted = (a.elements, b.elements), (a.width, b.width), (a.requires_grad, b.requires_grad)

        def one(which: int) -> Tensor | None:
            if not wanted[which]:
                return None
            grad = self.new(elements, width, "mul_backward")
            return grad if widths[which] == width else self.new(elements, widths[which], "to_backward")

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            of_b = one(1)
            of_a = one(0)
            # The engine sums a broadcast gradient to its tensor's shape when it validates the outputs.
            if of_a is not None and sizes[0] != elements:
                of_a = self.new(sizes[0], widths[0], "sum_to_size")
            if of_b is not None and sizes[1] != elements:
                of_b = self.new(sizes[1], widths[1], "sum_to_size")
            return of_a, of_b

        return self.operator((a, b), elements, width, "mul", backward, saves=_partners(a, b))

    def scale(self, x: Tensor, op: str = "mul") -> Tensor:
        """``x * number``: nothing is saved."""
        elements, width = x.elements, x.width

        def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
            scaled = self.new(elements, width, "mul_backward")
            scaled.head_major = grad.head_major
            return (scaled,)

        out = self.operator((x,), elements, width, op, backward)
        out.head_major = x.head_major
        return out

    def add(self, a: Tensor, b: Tensor, op: str = "add") -> Tensor:
        """``a + b``: both get the very same gradient (converted where the widths differ)."""
        elements, width, widths = a.elements, max(a.width, b.width), (a.width, b.width)
        wanted = a.requires_grad, b.requires_grad

        def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
            return tuple(
                None if not want else grad if w == width else self.new(elements, w, "to_backward")
                for want, w in zip(wanted, widths, strict=True)
            )

        return self.operator((a, b), elements, width, op, backward)

    def add_mask(self, scores: Tensor, mask_width: int) -> Tensor:
        """``scores + mask`` with a mask that needs no gradient, of ``mask_width`` bytes."""
        elements, wanted, width = scores.elements, scores.width, max(scores.width, mask_width)
        backward = passes_on if wanted == width else self.makes(elements, wanted, "to_backward")
        return self.operator((scores,), elements, width, "add", backward)

    def add_number(self, x: Tensor) -> Tensor:
        """``x + number``."""
        return self.operator((x,), x.elements, x.width, "add", passes_on)

    def clone(self, x: Tensor, op: str = "clone") -> Tensor:
        """A copy; the gradient passes through."""
        return self.operator((x,), x.elements, x.width, op, passes_on)

    def to(self, x: Tensor, width: int, label: str | None = None) -> Tensor:
        """``x.to(dtype)``: the same tensor if nothing changes."""
        if x.width == width:
            return x
        elements, before = x.elements, x.width
        back_label = Purpose.GRADS if self.tape.labels[x.storage.index] == Purpose.PARAMS else None

        def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
            back = self.new(elements, before, "to_backward", back_label)
            back.head_major = grad.head_major
            return (back,)

        return self.operator((x,), elements, width, "to", backward, label=label)

    def power(self, x: Tensor) -> Tensor:
        """``x.pow(2)``."""
        backward = self.makes(x.elements, x.width, "pow_backward", before=2)
        return self.operator((x,), x.elements, x.width, "pow", backward, saves=(x,))

    def mean(self, x: Tensor, rows: int) -> Tensor:
        """``x.mean(-1, keepdim=True)``: ``rows`` elements."""
        return self.operator((x,), rows, x.width, "mean", self.makes(x.elements, x.width, "mean_backward"))

    def rsqrt(self, x: Tensor) -> Tensor:
        """``torch.rsqrt(x)``: the result is saved."""
        backward = self.makes(x.elements, x.width, "rsqrt_backward", before=2)
        return self.operator((x,), x.elements, x.width, "rsqrt", backward, saves_result=True)

    def activation(self, x: Tensor, op: str) -> Tensor:
        """SiLU, GELU, tanh-like activation with one kernel each way; the input is saved."""
        backward = self.makes(x.elements, x.width, f"{op}_backward")
        return self.operator((x,), x.elements, x.width, op, backward, saves=(x,))

    def tanh(self, x: Tensor) -> Tensor:
        """``torch.tanh(x)``: the result is saved."""
        backward = self.makes(x.elements, x.width, "tanh_backward")
        return self.operator((x,), x.elements, x.width, "tanh", backward, saves_result=True)

    def dropout(self, x: Tensor) -> Tensor:
        """``native_dropout`` on CUDA: a 1-byte mask, saved, then the output."""
        node = self.node(x)
        mask = self.new(x.elements, 1, "dropout")
        out = self.new(x.elements, x.width, "dropout")
        if node is not None:
            self.save(node, mask)
            self.attach(out, node, self.makes(x.elements, x.width, "dropout_backward"))
        return out

    def softmax(self, x: Tensor, label: str) -> Tensor:
        """``softmax(x, -1)``: the result is saved; backward needs a temporary of the same size."""
        backward = self.makes(x.elements, x.width, "softmax_backward", after=1)
        return self.operator((x,), x.elements, x.width, "softmax", backward, saves_result=True, label=label)

    # ---- matrix products ----------------------------------------------------------------------------------------
    def workspace(self, library: str = "cublas") -> None:
        """The library's workspace: allocated by a thread's first product, kept for ever."""
        key = (library, self.thread)
        size = self._workspace_bytes[library]
        if key not in self._workspaces and size:
            self._workspaces[key] = self.new(size, 1, f"{library}_workspace", Purpose.CUBLAS_WORKSPACE)

    def linear(self, weight: Tensor, x: Tensor, outputs: int, label: str | None = None) -> Tensor:
        """``x @ weight.t()`` without bias, ``outputs`` columns (``F.linear``, one ``mm``)."""
        if self.autocast:
            weight, x = self.autocast_weight(weight), self.to(x, 2)
        x_elements, weight_elements, width = x.elements, weight.elements, x.width
        x_grad, weight_grad = x.requires_grad, weight.requires_grad
        grad_label = Purpose.GRADS if weight_grad and weight.node is None else None

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            of_weight = self.new(weight_elements, width, "mm_backward", grad_label) if weight_grad else None
            if of_weight is not None:
                self.workspace()
            of_x = self.new(x_elements, width, "mm_backward") if x_grad else None
            if of_x is not None:
                self.workspace()
            return of_x, of_weight

        rows = x_elements * outputs // weight_elements
        saves = _partners(x, weight)
        out = self.operator((x, weight), rows * outputs, width, "mm", backward, saves=saves, label=label)
        self.workspace()
        return out

    def autocast_weight(self, weight: Tensor) -> Tensor:
        """The 16-bit copy autocast makes of a weight; copies of trainable leaves are cached until autocast ends."""
        if weight.width == 2:
            return weight
        cached = self._autocast_cache.get(weight)
        if cached is None:
            cached = self.to(weight, 2)
            if weight.requires_grad and weight.node is None:
                self._autocast_cache[weight] = cached
        return cached

    def end_autocast(self) -> None:
        """Leave the autocast region: the cache is cleared."""
        self._autocast_cache.clear()

    def bmm(self, a: Tensor, b: Tensor, elements: int) -> Tensor:
        """Batched product with ``elements`` elements in the result; the gradient comes in [b, heads, s, d] memory."""
        sizes, width, wanted = (a.elements, b.elements), a.width, (a.requires_grad, b.requires_grad)

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            of_b = self.new(sizes[1], width, "bmm_backward") if wanted[1] else None
            of_a = self.new(sizes[0], width, "bmm_backward") if wanted[0] else None
            for grad in (of_a, of_b):
                if grad is not None:
                    grad.head_major = True
            return of_a, of_b

        out = self.operator((a, b), elements, width, "bmm", backward, saves=_partners(a, b))
        self.workspace()
        return out

    # ---- views that copy in backward ------------------------------------------------------------------------------
    def heads(self, x: Tensor) -> Tensor:
        """``x.view(b, s, heads, d).transpose(1, 2)``: same memory; a gradient in [b, heads, s, d] memory is copied."""
        node = self.node(x)
        out = Tensor(x.storage, x.elements, x.width)
        if node is not None:
            elements, width = x.elements, x.width

            def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
                return (self.new(elements, width, "view_backward"),) if grad.head_major else (grad,)

            self.attach(out, node, backward)
        return out

    def slice_columns(self, x: Tensor, columns: int, of: int) -> Tensor:
        """``x[..., i:j]`` with ``columns`` of ``of`` columns: a view; its gradient is zeros of the full size."""
        node = self.node(x)
        out = Tensor(x.storage, x.elements * columns // of, x.width)
        if node is not None:
            self.attach(out, node, self.makes(x.elements, x.width, "slice_backward"))
        return out

    def split(self, x: Tensor, parts: Sequence[int]) -> list[Tensor]:
        """``x.split(…)`` and ``x.chunk(…)``: views of one ``SplitBackward``, which concatenates their gradients.

        ``parts`` are their elements. Nodes here have one output, so the later parts' nodes keep their gradients for the
        first one's, which runs last.
        """
        elements, width = x.elements, x.width
        waiting: list[Tensor] = []

        def keep(grad: Tensor, _saved: list[Storage]) -> Grads:
            waiting.append(grad)
            return (None,)

        def join(_grad: Tensor, _saved: list[Storage]) -> Grads:
            whole = self.new(elements, width, "split_backward")
            waiting.clear()
            return (whole,)

        views = [Tensor(x.storage, part, width) for part in parts]
        for view in views:
            node = self.node(x)
            if node is not None:
                self.attach(view, node, join if view is views[0] else keep)
        return views

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        """``torch.cat((a, b), -1)``: the gradients are views of the incoming one."""
        return self.operator((a, b), a.elements + b.elements, a.width, "cat", lambda grad, _saved: (grad, grad))

    def repeat_heads(self, x: Tensor, groups: int) -> Tensor:
        """``repeat_kv`` / ``repeat_interleave``: every head ``groups`` times; the gradient is summed over them."""
        elements, width = x.elements, x.width

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            summed = self.new(elements, width, "repeat_kv_backward")
            summed.head_major = True
            return (summed,)

        out = self.operator((x,), elements * groups, width, "repeat_kv", backward)
        out.head_major = True
        return out


def _partners(a: Tensor, b: Tensor) -> list[Tensor]:
    """What a product saves: each factor that the other one's gradient needs."""
    return [other for one, other in ((a, b), (b, a)) if one.requires_grad]
