"""The autograd engine on byte counts: lifetimes, in-place sums, stolen gradients, both kinds of checkpointing."""

from __future__ import annotations

from memtrace.estimate.engine.autograd import Tensor
from memtrace.estimate.engine.ops import Ops
from memtrace.estimate.stream import Tape, alive


def fresh() -> tuple[Ops, Tape]:
    tape = Tape()
    return Ops(tape, 0, 0), tape


def leaf(ops: Ops, elements: int = 10) -> Tensor:
    tensor = ops.new(elements, 4, "leaf")
    tensor.requires_grad = True
    return tensor


def live(tape: Tape) -> list[str]:
    return [tape.ops[index] for index in alive(tape.events)]


def test_a_tensor_dies_with_its_last_reference() -> None:
    ops, tape = fresh()
    x = ops.new(8, 4, "x")
    view = Tensor(x.storage, 4, 4)
    del x
    assert tape.events == [0]
    del view
    assert tape.events == [0, ~0]


def test_saved_tensors_live_until_their_node_has_run() -> None:
    ops, tape = fresh()
    x = leaf(ops)
    y = ops.power(ops.scale(x))  # the product is saved by pow
    assert live(tape) == ["leaf", "mul", "pow"]
    grad = ops.new(10, 4, "grad")
    ops.backward(y, grad)
    del y
    # Scaling back allocates the gradient that becomes x.grad; nothing else survives.
    assert live(tape) == ["leaf", "grad", "mul_backward"]
    assert x.grad is not None and tape.ops[x.grad.storage.index] == "mul_backward"


def test_nothing_is_saved_without_gradients() -> None:
    ops, tape = fresh()
    y = ops.power(ops.scale(ops.new(10, 4, "x")))
    assert y.node is None
    assert live(tape) == ["pow"]
    ops.grad_enabled = False
    x = leaf(ops)
    assert ops.scale(x).node is None


def test_gradients_that_meet_are_summed_in_place() -> None:
    ops, tape = fresh()
    x = leaf(ops)
    middle = ops.scale(x)
    y = ops.add(ops.scale(middle), ops.activation(middle, "silu"))
    before = len(tape.sizes)
    ops.backward(y, ops.new(10, 4, "grad"))
    made = tape.ops[before + 1 :]
    assert made == ["silu_backward", "mul_backward", "mul_backward"]  # no "add"
    assert x.grad is not None


def test_a_shared_gradient_is_not_summed_in_place() -> None:
    ops, tape = fresh()
    x = leaf(ops)
    middle = ops.scale(x)
    y = ops.add(middle, ops.add_number(middle))  # both paths carry the very same gradient tensor
    grad = ops.new(10, 4, "grad")
    ops.backward(y, grad)
    assert "add" in tape.ops[tape.ops.index("grad") :]


def test_a_second_backward_adds_into_the_gradient() -> None:
    ops, tape = fresh()
    x = leaf(ops)
    for _ in range(2):
        ops.backward(ops.scale(x), ops.new(10, 4, "grad"))
    assert live(tape) == ["leaf", "mul_backward"]


def test_weight_gradient_comes_first_and_is_labelled() -> None:
    ops, tape = fresh()
    weight, x = leaf(ops, 6), leaf(ops, 8)
    out = ops.linear(weight, x, 3)  # 4 rows of 2, weight 3 × 2
    assert out.elements == 12
    start = len(tape.sizes)
    ops.backward(out, ops.new(12, 4, "grad"))
    assert [tape.sizes[i] for i in range(start + 1, len(tape.sizes))] == [24, 32]
    assert tape.labels[start + 1] == "lora/grads"


def test_checkpoint_keeps_its_input_and_stops_the_recompute_early() -> None:
    ops, tape = fresh()
    x = ops.scale(leaf(ops))
    out = ops.checkpoint(lambda t: ops.scale(ops.power(ops.scale(t, "first")), "last"), x)
    del x
    assert live(tape) == ["leaf", "mul", "last"]
    assert tape.labels[1] != "temporary/forward"
    ops.backward(out, ops.new(10, 4, "grad"))
    again = tape.ops[tape.ops.index("grad") :]
    assert again.count("first") == 1  # recomputed up to the input of pow, the last saved tensor
    assert "last" not in again and "pow" not in again
    assert [mark.name for mark in tape.marks] == ["recompute", "backward"]


def test_checkpoint_recomputes_once_for_all_saved_tensors() -> None:
    ops, tape = fresh()
    out = ops.checkpoint(lambda t: ops.power(ops.rsqrt(ops.power(t))), ops.scale(leaf(ops)))
    ops.backward(out, ops.new(10, 4, "grad"))
    assert sum(mark.name == "recompute" for mark in tape.marks) == 1
    del out
    assert live(tape).count("rsqrt") == 0


def test_reentrant_checkpoint_recomputes_everything() -> None:
    ops, tape = fresh()
    x = leaf(ops)
    out = ops.checkpoint_reentrant(lambda t: ops.scale(ops.power(t), "last"), ops.scale(x))
    assert live(tape) == ["leaf", "mul", "last"]
    ops.backward(out, ops.new(10, 4, "grad"))
    assert tape.ops.count("last") == 2 and tape.ops.count("pow") == 2
    assert x.grad is not None


def test_a_graph_holds_its_leaves_until_it_dies() -> None:
    ops, tape = fresh()
    x = leaf(ops)
    loss = ops.scale(x)
    ops.backward(loss, ops.new(10, 4, "grad"))
    del x
    assert "leaf" in live(tape)
    del loss
    assert live(tape) == []


def test_workspaces_are_one_a_thread_and_stay() -> None:
    tape = Tape()
    ops = Ops(tape, 100, 10)
    weight, x = leaf(ops, 6), leaf(ops, 8)
    out = ops.linear(weight, x, 3)
    ops.linear(weight, x, 3)
    assert tape.ops.count("cublas_workspace") == 1
    ops.backward(out, ops.new(12, 4, "grad"))
    assert tape.ops.count("cublas_workspace") == 2
    ops.workspace("cublaslt")
    assert tape.sizes[-1] == 10


def test_parts_of_a_split_keep_their_gradients_until_one_whole_is_made_of_them() -> None:
    """``SplitBackward``: nothing of the whole's size exists before the last part's gradient has come."""
    ops, tape = fresh()
    x = leaf(ops, 12)
    total: Tensor | None = None
    for part in ops.split(ops.scale(x), [6, 4, 2]):
        one = ops.mean(ops.power(part), 1)
        total = one if total is None else ops.add(total, one)
    assert total is not None
    ops.backward(total, ops.new(1, 4, "grad"))
    made = [(tape.ops[index], tape.sizes[index]) for index in tape.events if index >= 0]
    whole = made.index(("split_backward", 48))
    assert [made[:whole].count(("pow_backward", 4 * part)) for part in (6, 4, 2)] == [3, 3, 3]
    assert made[whole + 1] == ("mul_backward", 48) and made.count(("split_backward", 48)) == 1
    assert x.grad is not None
