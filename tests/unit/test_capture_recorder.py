"""The recorder against a stand-in for ``torch.cuda.memory``: phases, steps, labels, windows, errors."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from capture_standin import StandIn  # noqa: E402
from torch import nn  # noqa: E402

import memtrace  # noqa: E402
from memtrace.errors import MissingDependencyError, UsageError  # noqa: E402
from memtrace.record import api, labels, recorder  # noqa: E402


class Net(nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 64)
        self.register_buffer("table", torch.ones(32))

    def forward(self, x: Any) -> Any:
        """Forward."""
        return self.second(self.first(x).relu()) + self.table.sum()


def train(model: Any, optimizer: Any, steps: int, rows: int = 8) -> None:
    """An ordinary loop."""
    for _ in range(steps):
        model(torch.randn(rows, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def read(path: Path | None) -> dict[str, Any]:
    """A snapshot as any viewer would read it."""
    assert path is not None
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def builtins_only(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(type(k) is str and builtins_only(v) for k, v in value.items())
    if isinstance(value, list):
        return type(value) is list and all(map(builtins_only, value))
    return type(value) in (str, int, float, bool, type(None))


def test_record_writes_one_file_with_the_extra_key(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with memtrace.record(tmp_path / "run.pickle", model=model, optimizer=optimizer) as recording:
        train(model, optimizer, 3)
    snapshot = read(recording.file)
    assert [item.name for item in tmp_path.iterdir()] == ["run.pickle"]
    extra = snapshot.pop("memtrace")
    assert sorted(snapshot) == ["allocator_settings", "device_traces", "external_annotations", "segments"]
    wanted = {"version", "torch", "cuda", "gpu", "capability", "device_total_bytes", "device_free_bytes"}
    wanted |= {"limit_bytes", "pid", "rank", "world_size", "packages", "phases", "labels", "oom", "stats", "config"}
    assert wanted <= set(extra)
    assert builtins_only(extra)
    assert extra["version"] == 1
    assert extra["oom"] is None
    assert extra["config"]["models"][0]["class"] == "Net"
    assert extra["problems"] == []
    assert stand_in.recording is None


def test_memtrace_reads_its_own_file(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, optimizer, 2)
    snapshot = memtrace.load(recording.file)
    assert snapshot.memtrace["version"] == 1
    assert len(snapshot.device(0).trace) > 20


def test_phases_follow_an_unchanged_loop(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, optimizer, 2)
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 64))
        with recording.phase("checkpointing"):
            torch.ones(10)
    phases = read(recording.file)["memtrace"]["phases"]
    names = [(row["name"], row["step"]) for row in phases]
    step = ["forward", "backward", "between", "optimizer", "between"]
    wanted = [("load", 0), *((name, 0) for name in step), ("between", 1), *((name, 1) for name in step), ("between", 2)]
    assert names == [*wanted, ("evaluation", 2), ("between", 2), ("checkpointing", 2), ("between", 2)]
    times = [row["time_us"] for row in phases]
    assert times == sorted(times)


def test_phases_hold_the_events_that_belong_to_them(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, optimizer, 1)
    snapshot = read(recording.file)
    phases = snapshot["memtrace"]["phases"]
    allocs = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]

    def phase(entry: dict[str, Any]) -> str:
        return str([row["name"] for row in phases if row["time_us"] <= entry["time_us"]][-1])

    relu = next(entry for entry in allocs if entry["frames"][0]["name"] == "forward" or entry["size"] == 8 * 256 * 4)
    assert phase(relu) == "forward"
    assert {"forward", "backward", "optimizer"} <= {phase(entry) for entry in allocs}


def test_accumulation_counts_optimizer_steps(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
    phases = read(recording.file)["memtrace"]["phases"]
    assert [row["step"] for row in phases if row["name"] == "forward"] == [0, 0, 0, 1, 1, 1]


def test_an_optimizer_around_another_steps_once(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    class Outer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            inner.step()

    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, Outer(model.parameters(), {}), 3)
    assert read(recording.file)["memtrace"]["phases"][-1]["step"] == 3


def test_the_program_may_count_steps_itself(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizers = [torch.optim.SGD(model.first.parameters(), lr=0.1), torch.optim.SGD(model.second.parameters(), lr=0.1)]
    with memtrace.record(tmp_path / "run.pickle") as recording:
        for _ in range(3):
            model(torch.randn(8, 64)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            recording.step()
        assert recording.recorder is not None
        assert recording.recorder.log.step == 3


def test_labels_name_everything_by_identity(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW([model.second.weight, model.second.bias])
    model.first.requires_grad_(False)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    labels = read(recording.file)["memtrace"]["labels"]
    now = {row["name"]: row for row in labels if row["until_time_us"] is None}
    kinds = {name: f"{row['category']}/{row['subcategory']}" for name, row in now.items()}
    assert kinds["first.weight"] == "base_weights/unquantized"
    assert kinds["second.weight"] == "lora/params"
    assert kinds["second.weight.grad"] == "lora/grads"
    assert kinds["second.weight.exp_avg"] == "lora/optimizer_state"
    assert kinds["table"] == "base_weights/buffer"
    assert now["first.weight"]["address"] == model.first.weight.untyped_storage().data_ptr()
    assert now["first.weight"]["bytes"] == 64 * 256 * 4


def test_gradients_of_earlier_steps_keep_their_labels(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, optimizer, 3)
    snapshot = read(recording.file)
    trace = snapshot["device_traces"][0]
    past = [row for row in snapshot["memtrace"]["labels"] if row["until_time_us"] is not None]
    assert len(past) == 3 * 4
    for row in past:  # the storage at the address was alive at that time, and has that size
        assert row["subcategory"] == "grads"
        at = row["from_time_us"]
        before = [e for e in trace if e.get("addr") == row["address"] and e["time_us"] <= at]
        last = [entry for entry in before if entry["action"] in ("alloc", "free_completed")][-1]
        assert (last["action"], last["size"]) == ("alloc", row["bytes"])


def test_objects_that_are_gone_at_the_end_are_labelled_all_the_same(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most scripts train inside a function: model and optimizer are dead when the recording is written."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    addresses: dict[int, int] = {}
    outlives: list[nn.Module] = []

    def run() -> None:
        model = Net()
        told = lambda: {"model_type": "net", "collects": gc.isenabled()}  # noqa: E731
        model.config = SimpleNamespace(to_dict=told)  # type: ignore[assignment]
        outlives.append(model.second)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer, 3)
        for parameter in model.parameters():
            addresses[parameter.untyped_storage().data_ptr()] = parameter.untyped_storage().nbytes()
        for state in optimizer.state.values():
            addresses[state["exp_avg"].untyped_storage().data_ptr()] = state["exp_avg"].untyped_storage().nbytes()

    with memtrace.record(tmp_path / "run.pickle") as recording:
        run()
        gc.collect()
    snapshot = read(recording.file)
    extra = snapshot["memtrace"]
    labelled = {row["address"]: row["bytes"] for row in extra["labels"]}
    assert addresses.items() <= labelled.items()
    kept = [row for row in extra["labels"] if row["subcategory"] in ("params", "optimizer_state", "unquantized")]
    past = [row for row in kept if row["until_time_us"] is not None]
    assert past and all(row["from_time_us"] == row["until_time_us"] for row in past)
    told = [(model["class"], model["config"]) for model in extra["config"]["models"]]
    assert told == [("Net", {"model_type": "net", "collects": False})] and gc.isenabled()  # but for that first look
    assert [optimizer["class"] for optimizer in extra["config"]["optimizers"]] == ["Adam"]
    assert extra["config"]["autocast"] is True


class Answer:
    """What a model of transformers gives back."""

    def __init__(self, loss: torch.Tensor, logits: torch.Tensor | None) -> None:
        self.loss, self.logits = loss, logits


class Causal(nn.Module):
    def __init__(self, tiles: bool) -> None:
        super().__init__()
        self.table, self.tiles = nn.Embedding(16, 8), tiles

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Answer:
        logits = self.table(input_ids) @ self.table.weight.T
        return Answer(logits.logsumexp(-1).sum(), None if self.tiles else logits)


@pytest.mark.parametrize(
    ("holds", "tiles", "told"),
    [
        ("answer", False, {"keep_logits": True, "loss": "full"}),
        ("logits", False, {"keep_logits": True, "loss": "full"}),
        ("nothing", False, {"keep_logits": False, "loss": "full"}),
        ("answer", True, {"loss": "fused"}),
    ],
)
def test_batch_loss_and_held_logits_are_recorded(
    stand_in: StandIn, tmp_path: Path, holds: str, tiles: bool, told: dict[str, Any]
) -> None:
    model = Causal(tiles)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        for length in (3, 7, 5):
            for _ in range(2):
                answer = model(input_ids=torch.zeros(4, length, dtype=torch.long))
                loss, logits = answer.loss, answer.logits
                if holds != "answer":
                    del answer
                if holds != "logits":
                    del logits
                loss.backward()
            optimizer.step()
        with torch.no_grad():
            model(input_ids=torch.zeros(9, 9, dtype=torch.long))
    assert read(recording.file)["memtrace"]["config"]["run"] == {"batch": 4, "seq_len": 7, "accumulate": 2, **told}


def test_held_logits_are_seen_where_the_program_marks_its_phases(stand_in: StandIn, tmp_path: Path) -> None:
    model = Causal(tiles=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        assert recording.recorder is not None
        for _ in range(2):
            answer = model(input_ids=torch.zeros(4, 7, dtype=torch.long))
            recording.recorder.log.enter("backward")
            answer.loss.backward()
            optimizer.step()
    run = read(recording.file)["memtrace"]["config"]["run"]
    assert run == {"batch": 4, "seq_len": 7, "accumulate": 1, "keep_logits": True, "loss": "full"}


class Hidden:
    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor) -> Hidden:
        return Hidden(self.table(input_ids))


@pytest.mark.parametrize(
    ("rows", "told"),
    [(8, {"loss": "chunked", "chunk_tokens": 8}), (28, {"loss": "full"}), (0, {"loss": "own"})],
)
def test_a_loss_that_the_program_makes_of_hidden_states(
    stand_in: StandIn, tmp_path: Path, rows: int, told: dict[str, Any]
) -> None:
    """Hidden states that the head gets are no batch of sequences."""
    base, head = Base(), nn.Linear(8, 16)
    optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        for _ in range(2):
            states = base(input_ids=torch.zeros(4, 7, dtype=torch.long)).last_hidden_state.reshape(-1, 8)
            chunks = states.split(rows) if rows else (states,)
            losses = [(head(chunk) if rows else chunk @ head.weight.T).logsumexp(-1).sum() for chunk in chunks]
            torch.stack(losses).sum().backward()
            optimizer.step()
    assert read(recording.file)["memtrace"]["config"]["run"] == {"batch": 4, "seq_len": 7, "accumulate": 1, **told}


def test_lengths_of_the_largest_batch_are_read_from_its_mask(stand_in: StandIn, tmp_path: Path) -> None:
    model = Causal(tiles=False)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        for lengths in ([2, 2], [7, 3], [5, 5]):
            ids = torch.zeros(2, max(lengths), dtype=torch.long)
            mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
            model(input_ids=ids, attention_mask=mask).loss.backward()
    run = read(recording.file)["memtrace"]["config"]["run"]
    assert (run["batch"], run["seq_len"], run["lengths"]) == (2, 7, [7, 3])


def test_window_of_steps(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle", steps=(2, 4)):
        train(model, optimizer, 6)
    assert [item.name for item in tmp_path.iterdir()] == ["run-steps2-4.pickle"]
    extra = read(tmp_path / "run-steps2-4.pickle")["memtrace"]
    assert {row["step"] for row in extra["phases"] if row["name"] == "forward"} == {2, 3}
    assert stand_in.started == 1


def test_window_that_is_never_reached(stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle", steps=(10, 12)):
        train(model, optimizer, 2)
    assert list(tmp_path.iterdir()) == []
    assert "ended in step 2, before step 10" in capsys.readouterr().err


def test_ring_overflow_is_said(stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle", max_entries=20) as recording:
        train(model, optimizer, 2)
    extra = read(recording.file)["memtrace"]
    assert extra["recording"]["overflowed"]
    assert "ring of 20 events overflowed" in capsys.readouterr().err


def test_hooks_are_gone_afterwards(stand_in: StandIn, tmp_path: Path) -> None:
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    backward, call = torch.autograd.backward, Net.__call__
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle", deep=True):
        train(model, optimizer, 2)
        assert Net.__call__ is not call
    assert torch.autograd.backward is backward
    assert Net.__call__ is call
    assert "__call__" not in Net.__dict__
    assert not modules._global_forward_pre_hooks
    assert not modules._global_forward_hooks
    assert not optimizers._global_optimizer_pre_hooks


def test_discovery_hooks_go_after_the_first_step(stand_in: StandIn, tmp_path: Path) -> None:
    from torch.nn.modules import module as modules

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle"):
        assert modules._global_forward_pre_hooks
        train(model, optimizer, 1)
        assert not modules._global_forward_pre_hooks


def test_watched_models_still_pickle(stand_in: StandIn, tmp_path: Path) -> None:
    import copy

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle"):
        train(model, optimizer, 2)
        copied = pickle.loads(pickle.dumps(model))
        copy.deepcopy(model)
    copied(torch.randn(2, 64))


def test_compiled_models_are_traced_without_hooks(stand_in: StandIn, tmp_path: Path) -> None:
    from torch.nn.modules import module as modules

    hooks_seen = []

    def backend_of_compiler(graph: Any, _inputs: Any) -> Any:
        hooks_seen.append(len(modules._global_forward_pre_hooks))
        return graph.forward

    model = Net()
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend_of_compiler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(compiled, optimizer, 3)
    names = [row["name"] for row in read(recording.file)["memtrace"]["phases"]]
    assert names.count("forward") == names.count("optimizer") == 3
    assert set(hooks_seen) <= {0}


def test_deep_stamps_module_names(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle", deep=True) as recording:
        train(model, optimizer, 1)
    trace = read(recording.file)["device_traces"][0]
    assert {"first", "second"} <= {entry["user_metadata"] for entry in trace}
    assert trace[-1]["user_metadata"] == ""


def test_unwinder_failure_falls_back(stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in.unwinder_fails = True
    with memtrace.record(tmp_path / "run.pickle", stacks="all") as recording:
        torch.ones(10)
    assert read(recording.file)["memtrace"]["recording"]["stacks"] == "python"
    assert "recording Python stacks only" in capsys.readouterr().err


def test_oom_is_saved_inside_the_observer(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(torch.OutOfMemoryError), memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, optimizer, 2)
        stand_in.capacity = stand_in.allocated + 150_000
        train(model, optimizer, 1, rows=400)
    assert [item.name for item in tmp_path.iterdir()] == ["run.pickle"]
    snapshot = read(recording.file)
    trace = snapshot["device_traces"][0]
    assert trace[-1]["action"] == "oom"
    oom = snapshot["memtrace"]["oom"]
    assert (oom["phase"], oom["step"]) == ("forward", 2)
    assert oom["message"].startswith("CUDA out of memory")
    assert oom["requested_bytes"] == trace[-1]["size"]
    held = sum(segment["allocated_size"] for segment in snapshot["segments"])
    assert held == oom["device_in_use_bytes"]  # nothing had been unwound yet
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert "phase forward, step 2" in lines[0]
    assert str(tmp_path / "run.pickle") in lines[3]
    assert lines[4].startswith("memtrace: next: memtrace explain ")


def test_handled_oom_is_not_a_failure(stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with memtrace.record(tmp_path / "run.pickle"):
        train(model, optimizer, 1)
        stand_in.capacity = stand_in.allocated + 1_000_000
        for rows in (100_000, 50_000, 8):
            try:
                train(model, optimizer, 1, rows)
                break
            except torch.OutOfMemoryError:
                continue
    assert sorted(item.name for item in tmp_path.iterdir()) == ["run-oom.pickle", "run.pickle"]
    err = capsys.readouterr().err
    assert "2 out-of-memory errors were handled by the program itself" in err
    assert "next: memtrace explain" not in err
    assert read(tmp_path / "run.pickle")["memtrace"]["oom"] is None
    assert read(tmp_path / "run-oom.pickle")["memtrace"]["oom"]["requested_bytes"] == 50_000 * 64 * 4


def test_the_same_handled_request_is_saved_three_times(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    whole = stand_in.snapshot
    monkeypatch.setattr(stand_in, "snapshot", lambda: taken.append(1) or whole())  # type: ignore[func-returns-value]
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    stand_in.capacity = 1 << 22
    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, optimizer, 1)
        for _ in range(10):
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1 << 22)
            train(model, optimizer, 1)
        assert recording.recorder is not None
        assert recording.recorder.ooms.count == 10
    assert len(taken) == 3 + 1  # three times, and at the end


def test_an_error_caused_by_an_oom_counts_as_one(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.capacity = 1 << 20
    with pytest.raises(ValueError, match="gave up"), memtrace.record(tmp_path / "run.pickle") as recording:
        try:
            torch.ones(1 << 22)
        except torch.OutOfMemoryError as error:
            raise ValueError("gave up") from error
    assert read(recording.file)["memtrace"]["reason"] == "oom"


def test_an_error_raised_while_an_oom_was_handled_counts_as_one(stand_in: StandIn, tmp_path: Path) -> None:
    """Clean-up code that fails in ``except`` hides the error that mattered; Python keeps it as the context."""
    stand_in.capacity = 1 << 20
    with pytest.raises(KeyError), memtrace.record(tmp_path / "run.pickle") as recording:
        model = Net()
        try:
            torch.ones(1 << 22)
        except torch.OutOfMemoryError:
            model(torch.randn(2, 64))  # progress: not pending any more
            {}["batch"]
    assert read(recording.file)["memtrace"]["reason"] == "oom"
    assert "Tried to allocate" in read(recording.file)["memtrace"]["oom"]["message"]


def test_weights_that_require_a_gradient_and_get_none_are_not_trained(stand_in: StandIn, tmp_path: Path) -> None:
    used, unused = Net(), Net().eval()
    optimizer = torch.optim.SGD([*used.parameters(), *unused.parameters()], lr=0.1)
    with memtrace.record(tmp_path / "run.pickle", model=[used, unused]) as recording:
        with torch.no_grad():
            unused(torch.randn(2, 64))
        train(used, optimizer, 2)
    rows = [row for row in read(recording.file)["memtrace"]["labels"] if row["until_time_us"] is None]
    kinds = {row["address"]: row["category"] for row in rows}
    assert {kinds[p.untyped_storage().data_ptr()] for p in used.parameters()} == {"lora"}
    assert {kinds[p.untyped_storage().data_ptr()] for p in unused.parameters()} == {"base_weights"}


def test_inference_trains_nothing(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net().eval()
    with memtrace.record(tmp_path / "run.pickle") as recording, torch.no_grad():
        model(torch.randn(2, 64))
    labels = read(recording.file)["memtrace"]["labels"]
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {row["category"] for row in labels if row["address"] in mine} == {"base_weights"}


def test_an_error_in_the_first_backward_pass_leaves_all_weights_trained(stand_in: StandIn, tmp_path: Path) -> None:
    """Only some have a gradient by then; what the optimizer holds is what is trained."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run_out(grad: Any) -> None:
        stand_in.capacity = stand_in.allocated
        torch.ones(1 << 20)

    with pytest.raises(torch.OutOfMemoryError), memtrace.record(tmp_path / "run.pickle") as recording:
        hidden = model.first(torch.randn(8, 64))
        hidden.register_hook(run_out)
        (model.second(hidden).sum() + model.table.sum()).backward()
        optimizer.step()
    labels = read(recording.file)["memtrace"]["labels"]
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {row["category"] for row in labels if row["address"] in mine} == {"lora"}


def test_gradients_of_an_optimizer_of_ones_own_are_labelled(stand_in: StandIn, tmp_path: Path) -> None:
    model = Net()
    with memtrace.record(tmp_path / "run.pickle") as recording:
        for _ in range(3):
            model(torch.randn(8, 64)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    labels = read(recording.file)["memtrace"]["labels"]
    assert sorted(row["name"] for row in labels if row["subcategory"] == "grads") == sorted(
        2 * [f"{name}.grad" for name, _ in model.named_parameters()]
    )


def test_a_program_that_stops_the_recording_itself(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, optimizer, 2)
        stand_in.on_stopped()  # as torch.cuda.memory._record_memory_history(enabled=None) does
        stand_in.stop()
        train(model, optimizer, 1)
    snapshot = read(recording.file)
    assert [item.name for item in tmp_path.iterdir()] == ["run.pickle"]
    assert [row["step"] for row in snapshot["memtrace"]["phases"] if row["name"] == "forward"] == [0, 1]
    assert len(snapshot["device_traces"][0]) > 20
    assert "the program stopped the recording itself" in capsys.readouterr().err


def test_a_recording_stopped_unnoticed_says_so(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    with memtrace.record(tmp_path / "run.pickle", model=model) as recording:
        model(torch.randn(8, 64))
        stand_in.stop()
    assert "switched PyTorch's recording off" in read(recording.file)["memtrace"]["problems"][0]
    assert "switched PyTorch's recording off" in capsys.readouterr().err


def test_the_first_step_searches_nothing(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going through all of a process's objects takes a fifth of a second."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memtrace.record(tmp_path / "run.pickle"):
        monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("searched"))
        train(model, optimizer, 2)
        monkeypatch.undo()


def test_a_failing_recorder_never_disturbs(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("INTERNAL ASSERT FAILED\n at somewhere")

    monkeypatch.setattr(stand_in, "snapshot", broken)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    stand_in.capacity = 1 << 22
    with memtrace.record(tmp_path / "run.pickle") as recording:
        train(model, optimizer, 1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1 << 22)
        assert recording.dump() is None
        train(model, optimizer, 1)
    assert list(tmp_path.iterdir()) == []
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("memtrace: ") and "the program goes on" in line for line in lines)


def test_labels_that_fail_do_not_lose_the_file(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    model = Net()
    with memtrace.record(tmp_path / "run.pickle", model=model) as recording:
        model(torch.randn(2, 64))
        monkeypatch.setattr(labels, "contents", refuse)
    extra = read(recording.file)["memtrace"]
    assert extra["labels"] == []
    assert set(extra["problems"]) == {"RuntimeError: no"}


def test_inner_record_joins_the_outer(stand_in: StandIn, tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "outer.pickle") as outer:
        with memtrace.record(tmp_path / "inner.pickle") as inner, inner.phase("inside"):
            torch.ones(10)
        assert stand_in.recording is not None
    assert [item.name for item in tmp_path.iterdir()] == ["outer.pickle"]
    assert "inside" in [row["name"] for row in read(outer.file)["memtrace"]["phases"]]


def test_dump_on_request(stand_in: StandIn, tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "run.pickle") as recording:
        assert recording.dump() == tmp_path / "run-request.pickle"
        assert recording.dump() == tmp_path / "run-request-2.pickle"
        assert recording.dump(tmp_path / "mine.pickle") == tmp_path / "mine.pickle"
    assert len(list(tmp_path.iterdir())) == 4


def test_limit_and_memory_are_stored(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.capacity, stand_in.fraction = 1 << 30, 0.25
    with memtrace.record(tmp_path / "run.pickle") as recording:
        kept = torch.ones(1000)
    extra = read(recording.file)["memtrace"]
    assert extra["device_total_bytes"] == 1 << 30
    assert extra["limit_bytes"] == 1 << 28
    assert extra["device_free_bytes"] == (1 << 30) - stand_in.allocated
    assert kept.numel() == 1000


def test_rank_is_in_the_name(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with memtrace.record(tmp_path / "run.pickle") as recording:
        torch.ones(1)
    assert recording.file == tmp_path / "run-rank1.pickle"
    extra = read(recording.file)["memtrace"]
    assert (extra["rank"], extra["world_size"]) == (1, 2)


@pytest.mark.parametrize("options", [{"stacks": "cpp"}, {"max_entries": 0}, {"steps": (3, 3)}, {"steps": (-1, 2)}])
def test_bad_options(stand_in: StandIn, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        memtrace.record(tmp_path / "run.pickle", **options)


def test_where_recording_is_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with api.record(tmp_path / "run.pickle") as recording, recording.phase("x"):
        recording.step()
        assert recording.dump() is None
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(MissingDependencyError):
        api.record(tmp_path / "run.pickle", required=True)
    assert list(tmp_path.iterdir()) == []


def test_step_log_is_kept_whether_or_not_a_step_is_recorded(stand_in: StandIn, tmp_path: Path) -> None:
    from memtrace.answers.steps import read_log

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = recorder.RecordOptions(tmp_path, "run", steps=(1, 2), step_log=True)
    rec = recorder.Recorder(options, model, optimizer)
    rec.begin()
    train(model, optimizer, 3)
    with torch.no_grad():
        model(torch.randn(100, 64))  # belongs to a step that never ended
    rec.end()
    log = read_log(tmp_path / "run.steps.jsonl")
    assert log.step.tolist() == [0, 1, 2] and log.tokens.tolist() == [8 * 64] * 3


def test_a_forked_child_of_a_recorded_block_leaves_the_file_to_its_parent(stand_in: StandIn, tmp_path: Path) -> None:
    with api.record(tmp_path / "run.pickle") as recording:
        child = os.fork()
        if not child:
            try:
                recording.close()
            finally:
                os._exit(len(list(tmp_path.iterdir())))
        assert os.waitpid(child, 0)[1] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.pickle"]
