"""Elementwise and reducing operators on byte counts: what each allocates, saves, and allocates in backward.

Every operator follows PyTorch's formula in ``derivatives.yaml`` and the order of the generated code: inputs are
saved before the output exists, results after it; gradients of later arguments are computed first.
"""

from __future__ import annotations

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.engine import Engine, Grads, Storage, Tensor

GRADS = Purpose.GRADS
PARAMS = Purpose.PARAMS


class Elementwise(Engine):
    """The engine with operators that work element by element or reduce a dimension."""

    def mul(self, a: Tensor, b: Tensor, op: str = "mul") -> Tensor:
        """``a * b`` with broadcasting of the smaller one; both of one width."""
        node = self.node(a, b)
        if node is not None:
            if a.requires_grad:
                self.save(node, b)
            if b.requires_grad:
                self.save(node, a)
        elements, width = max(a.elements, b.elements), max(a.width, b.width)
        out = self.new(elements, width, op)
        if node is not None:
            sizes, wanted = (a.elements, b.elements), (a.requires_grad, b.requires_grad)
            widths = a.width, b.width

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

            self.attach(out, node, backward)
        return out

    def scale(self, x: Tensor, op: str = "mul") -> Tensor:
        """``x * number``: nothing is saved."""
        node = self.node(x)
        out = self.new(x.elements, x.width, op)
        out.head_major = x.head_major
        if node is not None:
            elements, width = x.elements, x.width

            def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
                scaled = self.new(elements, width, "mul_backward")
                scaled.head_major = grad.head_major
                return (scaled,)

            self.attach(out, node, backward)
        return out

    def add(self, a: Tensor, b: Tensor, op: str = "add") -> Tensor:
        """``a + b``: both get the very same gradient (converted where the widths differ)."""
        node = self.node(a, b)
        out = self.new(a.elements, max(a.width, b.width), op)
        if node is not None:
            elements, width, widths = a.elements, out.width, (a.width, b.width)
            wanted = a.requires_grad, b.requires_grad

            def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
                return tuple(
                    None if not want else grad if w == width else self.new(elements, w, "to_backward")
                    for want, w in zip(wanted, widths, strict=True)
                )

            self.attach(out, node, backward)
        return out

    def add_mask(self, scores: Tensor, mask_width: int) -> Tensor:
        """``scores + mask`` with a mask that needs no gradient, of ``mask_width`` bytes."""
        node = self.node(scores)
        out = self.new(scores.elements, max(scores.width, mask_width), "add")
        if node is not None:
            elements, width, wanted = scores.elements, out.width, scores.width

            def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
                return (grad if wanted == width else self.new(elements, wanted, "to_backward"),)

            self.attach(out, node, backward)
        return out

    def add_number(self, x: Tensor) -> Tensor:
        """``x + number``."""
        node = self.node(x)
        out = self.new(x.elements, x.width, "add")
        if node is not None:
            self.attach(out, node, lambda grad, _saved: (grad,))
        return out

    def to(self, x: Tensor, width: int, label: str | None = None) -> Tensor:
        """``x.to(dtype)``: the same tensor if nothing changes."""
        if x.width == width:
            return x
        node = self.node(x)
        out = self.new(x.elements, width, "to", label)
        if node is not None:
            elements, before = x.elements, x.width
            back_label = GRADS if self.tape.labels[x.storage.index] == PARAMS else None

            def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
                back = self.new(elements, before, "to_backward", back_label)
                back.head_major = grad.head_major
                return (back,)

            self.attach(out, node, backward)
        return out

    def clone(self, x: Tensor, op: str = "clone") -> Tensor:
        """A copy; the gradient passes through."""
        node = self.node(x)
        out = self.new(x.elements, x.width, op)
        if node is not None:
            self.attach(out, node, lambda grad, _saved: (grad,))
        return out

    def power(self, x: Tensor) -> Tensor:
        """``x.pow(2)``."""
        node = self.node(x)
        if node is not None:
            self.save(node, x)
        out = self.new(x.elements, x.width, "pow")
        if node is not None:
            elements, width = x.elements, x.width

            def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
                powered = self.new(elements, width, "pow_backward")
                scaled = self.new(elements, width, "pow_backward")
                out = self.new(elements, width, "pow_backward")
                del scaled, powered
                return (out,)

            self.attach(out, node, backward)
        return out

    def mean(self, x: Tensor, rows: int) -> Tensor:
        """``x.mean(-1, keepdim=True)``: ``rows`` elements."""
        node = self.node(x)
        out = self.new(rows, x.width, "mean")
        if node is not None:
            elements, width = x.elements, x.width
            self.attach(out, node, lambda _grad, _saved: (self.new(elements, width, "mean_backward"),))
        return out

    def rsqrt(self, x: Tensor) -> Tensor:
        """``torch.rsqrt(x)``: the result is saved."""
        node = self.node(x)
        out = self.new(x.elements, x.width, "rsqrt")
        if node is not None:
            self.save(node, out)
            elements, width = x.elements, x.width

            def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
                scaled = self.new(elements, width, "rsqrt_backward")
                cubed = self.new(elements, width, "rsqrt_backward")
                out = self.new(elements, width, "rsqrt_backward")
                del cubed, scaled
                return (out,)

            self.attach(out, node, backward)
        return out

    def activation(self, x: Tensor, op: str) -> Tensor:
        """SiLU, GELU, tanh-like activation with one kernel each way; the input is saved."""
        node = self.node(x)
        if node is not None:
            self.save(node, x)
        out = self.new(x.elements, x.width, op)
        if node is not None:
            elements, width = x.elements, x.width
            self.attach(out, node, lambda _grad, _saved: (self.new(elements, width, f"{op}_backward"),))
        return out

    def tanh(self, x: Tensor, label: str | None = None) -> Tensor:
        """``torch.tanh(x)``: the result is saved."""
        node = self.node(x)
        out = self.new(x.elements, x.width, "tanh", label)
        if node is not None:
            self.save(node, out)
            elements, width = x.elements, x.width
            self.attach(out, node, lambda _grad, _saved: (self.new(elements, width, "tanh_backward"),))
        return out

    def dropout(self, x: Tensor) -> Tensor:
        """``native_dropout`` on CUDA: a 1-byte mask, saved, then the output."""
        node = self.node(x)
        mask = self.new(x.elements, 1, "dropout")
        out = self.new(x.elements, x.width, "dropout")
        if node is not None:
            self.save(node, mask)
            elements, width = x.elements, x.width
            self.attach(out, node, lambda _grad, _saved: (self.new(elements, width, "dropout_backward"),))
        return out

    def softmax(self, x: Tensor, label: str) -> Tensor:
        """``softmax(x, -1)``: the result is saved; backward needs a temporary of the same size."""
        node = self.node(x)
        out = self.new(x.elements, x.width, "softmax", label)
        if node is not None:
            self.save(node, out)
            elements, width = x.elements, x.width

            def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
                out = self.new(elements, width, "softmax_backward")
                self.new(elements, width, "softmax_backward")
                return (out,)

            self.attach(out, node, backward)
        return out
