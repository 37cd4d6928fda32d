"""Matrix products with their workspaces and autocast copies, and views; on top of the elementwise operators."""

from __future__ import annotations

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.elementwise import GRADS, Elementwise
from memtrace.estimate.engine.engine import Grads, Storage, Tensor
from memtrace.estimate.engine.tape import Tape

CUBLAS = Purpose.CUBLAS_WORKSPACE


class Ops(Elementwise):
    """The engine with PyTorch's operators. ``cublas_bytes`` is the workspace of one thread's handle."""

    def __init__(self, tape: Tape, cublas_bytes: int, cublaslt_bytes: int, autocast: bool = False) -> None:
        super().__init__(tape)
        self.autocast = autocast
        self._autocast_cache: dict[Tensor, Tensor] = {}
        self._workspace_bytes = {"cublas": cublas_bytes, "cublaslt": cublaslt_bytes}
        self._workspaces: dict[tuple[str, str], Tensor] = {}

    # ---- matrix products ----------------------------------------------------------------------------------------
    def workspace(self, library: str = "cublas") -> None:
        """The library's workspace: allocated by a thread's first product, kept for ever."""
        key = (library, self.thread)
        size = self._workspace_bytes[library]
        if key not in self._workspaces and size:
            self._workspaces[key] = self.new(size, 1, f"{library}_workspace", CUBLAS)

    def warm_up(self, biased: bool) -> None:
        """Both threads have multiplied before, with ``biased`` products too where the model has them."""
        for self.thread in ("backward", "forward"):
            self.workspace()
            if biased:
                self.workspace("cublaslt")

    def linear(self, weight: Tensor, x: Tensor, outputs: int, label: str | None = None) -> Tensor:
        """``x @ weight.t()`` without bias, ``outputs`` columns (``F.linear``, one ``mm``)."""
        if self.autocast:
            weight, x = self.autocast_weight(weight), self.to(x, 2)
        rows = x.elements * outputs // weight.elements
        node = self.node(x, weight)
        if node is not None:
            if x.requires_grad:
                self.save(node, weight)
            if weight.requires_grad:
                self.save(node, x)
        out = self.new(rows * outputs, x.width, "mm", label)
        self.workspace()
        if node is not None:
            x_elements, weight_elements, width = x.elements, weight.elements, x.width
            x_grad, weight_grad = x.requires_grad, weight.requires_grad
            trained = weight_grad and weight.node is None

            def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
                label = GRADS if trained else None
                of_weight = self.new(weight_elements, width, "mm_backward", label) if weight_grad else None
                if of_weight is not None:
                    self.workspace()
                of_x = self.new(x_elements, width, "mm_backward") if x_grad else None
                if of_x is not None:
                    self.workspace()
                return of_x, of_weight

            self.attach(out, node, backward)
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

    def bmm(self, a: Tensor, b: Tensor, elements: int, op: str = "bmm", label: str | None = None) -> Tensor:
        """Batched product with ``elements`` elements in the result; the gradient comes in [b, heads, s, d] memory."""
        node = self.node(a, b)
        if node is not None:
            if a.requires_grad:
                self.save(node, b)
            if b.requires_grad:
                self.save(node, a)
        out = self.new(elements, a.width, op, label)
        self.workspace()
        if node is not None:
            sizes, width, wanted = (a.elements, b.elements), a.width, (a.requires_grad, b.requires_grad)

            def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
                of_b = self.new(sizes[1], width, "bmm_backward") if wanted[1] else None
                of_a = self.new(sizes[0], width, "bmm_backward") if wanted[0] else None
                for grad in (of_a, of_b):
                    if grad is not None:
                        grad.head_major = True
                return of_a, of_b

            self.attach(out, node, backward)
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
            elements, width = x.elements, x.width
            self.attach(out, node, lambda _grad, _saved: (self.new(elements, width, "slice_backward"),))
        return out

    def chunk2(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x.chunk(2, -1)``: two views of one ``SplitBackward``, which concatenates their gradients.

        Nodes here have one output, so the second half's node keeps its gradient for the first half's.
        """
        elements, width = x.elements, x.width
        node_first, node_second = self.node(x), self.node(x)
        first = Tensor(x.storage, elements // 2, width)
        second = Tensor(x.storage, elements // 2, width)
        if node_first is not None and node_second is not None:
            waiting: list[Tensor] = []

            def of_second(grad: Tensor, _saved: list[Storage]) -> Grads:
                waiting.append(grad)
                return (None,)

            def of_first(_grad: Tensor, _saved: list[Storage]) -> Grads:
                whole = self.new(elements, width, "split_backward")
                waiting.clear()
                return (whole,)

            self.attach(first, node_first, of_first)
            self.attach(second, node_second, of_second)
        return first, second

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        """``torch.cat((a, b), -1)``: the gradients are views of the incoming one."""
        node = self.node(a, b)
        out = self.new(a.elements + b.elements, a.width, "cat")
        if node is not None:
            self.attach(out, node, lambda grad, _saved: (grad, grad))
        return out

    def repeat_heads(self, x: Tensor, groups: int) -> Tensor:
        """``repeat_kv`` / ``repeat_interleave``: every head ``groups`` times; the gradient is summed over them."""
        node = self.node(x)
        out = self.new(x.elements * groups, x.width, "repeat_kv")
        out.head_major = True
        if node is not None:
            elements, width = x.elements, x.width

            def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
                summed = self.new(elements, width, "repeat_kv_backward")
                summed.head_major = True
                return (summed,)

            self.attach(out, node, backward)
        return out
