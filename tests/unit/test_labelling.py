"""The derivation of truth labels: alignment of two runs, ends of recomputations, attention scores."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.labelling.alignment import Feature, align
from tools.labelling.files import pack_stamps, unpack_stamps
from tools.labelling.labels import truth
from tools.labelling.rows import Run, site

MIB = 1 << 20
_sizes = st.lists(st.sampled_from([512, 1024, 4096]), max_size=40)


def _feature(size: int, where: str = "", lifetime: int = 1, optional: bool = False) -> Feature:
    return Feature(size, where, lifetime, "", optional)


@given(st.lists(st.tuples(st.sampled_from([512, 1024, 4096]), st.booleans()), max_size=60))
def test_optional_rows_never_shift_the_others(rows: list[tuple[int, bool]]) -> None:
    right = [_feature(size, optional=optional) for size, optional in rows]
    left = [_feature(size) for size, optional in rows if not optional]
    pairs = align(left, right)
    assert [i for i, _ in pairs] == list(range(len(left)))
    assert all(left[i].size == right[j].size for i, j in pairs)
    assert all(not right[j].optional for _, j in pairs)


@given(_sizes, _sizes)
def test_pairs_ascend_and_agree_in_size(left: list[int], right: list[int]) -> None:
    pairs = align([_feature(size) for size in left], [_feature(size) for size in right])
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert all(left[i] == right[j] for i, j in pairs)


def test_optional_rows_pair_where_the_other_run_has_them_too() -> None:
    right = [_feature(8), _feature(8, optional=True), _feature(16)]
    assert align([_feature(8), _feature(8), _feature(16)], right) == [(0, 0), (1, 1), (2, 2)]


def test_sizes_may_differ_at_one_line_of_python_only() -> None:
    left = [_feature(100), _feature(170, "a.py:1:f"), _feature(200)]
    assert align(left, [_feature(100), _feature(171, "a.py:1:f"), _feature(200)]) == [(0, 0), (1, 1), (2, 2)]
    assert align(left, [_feature(100), _feature(171, "a.py:2:f"), _feature(200)]) == [(0, 0), (2, 2)]


def test_a_band_holds_sequences_of_very_different_length() -> None:
    right = [_feature(8, optional=True)] * 300 + [_feature(16)] * 5
    assert align([_feature(16)] * 5, right, slack=2) == [(i, 300 + i) for i in range(5)]


def test_site_skips_the_plumbing() -> None:
    frames = [
        {"filename": "/x/memtrace/record/stamps.py", "line": 1, "name": "__torch_dispatch__"},
        {"filename": "/x/torch/_ops.py", "line": 2, "name": "__call__"},
        {"filename": "??", "line": 0, "name": "at::empty"},
        {"filename": "/x/models/llama.py", "line": 7, "name": "forward"},
    ]
    assert site({"frames": frames}) == "llama.py:7:forward"
    assert site({}) == ""


class _Trace:
    """Builds the events of a run by hand; each event takes one microsecond."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.marks: list[tuple[int, str]] = []
        self.sizes: dict[int, int] = {}

    def mark(self, name: str) -> None:
        self.marks.append((len(self.events), name))

    def _event(self, action: str, address: int, size: int, text: str) -> None:
        entry = {"action": action, "addr": address, "size": size, "time_us": len(self.events), "user_metadata": text}
        self.events.append(entry)

    def alloc(self, address: int, size: int, text: str = "") -> None:
        self.sizes[address] = size
        self._event("alloc", address, size, text)

    def free(self, address: int, text: str = "") -> None:
        self._event("free_requested", address, self.sizes[address], text)
        self._event("free_completed", address, self.sizes[address], text)

    def run(self) -> Run:
        return Run(self.events, self.marks, [])


def _operator(name: str, address: int, shape: tuple[int, ...], call: int, recomputed: bool = False) -> list[Any]:
    return [name, [[address, list(shape), True]], "", recomputed, recomputed, False, False, call]


def _recomputed(stamped: bool) -> Run:
    trace = _Trace()

    def text(value: str) -> str:
        return value if stamped else ""

    trace.mark("ready")
    trace.mark("forward")
    trace.mark("backward")
    trace.alloc(1, 4096, text("0"))  # freed within the recomputation
    trace.alloc(2, 8192, text("1"))  # a local, freed by the unwinding
    trace.free(1, text("1+0"))
    trace.alloc(3, 2048, text("2"))  # saved
    trace.free(2, text("2+1"))
    trace.alloc(4, 1024, text("3"))
    trace.free(3, text("3+1"))
    trace.mark("end")
    return trace.run()


def _recompute_log() -> dict[str, Any]:
    operators = [_operator("aten.mul.Tensor", n + 1, (4, 4), 1, recomputed=n < 3) for n in range(4)]
    return {"operators": operators, "saved": [[3, 3, True]], "recomputes": [[0, 3]]}


def test_recompute_is_what_lives_when_the_recomputation_stops_not_after_its_unwinding() -> None:
    labels = truth(_recomputed(False), _recomputed(True), _recompute_log(), 7, {})["label"]
    expected = ["temporary/forward", "activations/recompute", "activations/recompute", "temporary/backward"]
    assert labels == expected


def test_labels_derived_anew_from_the_kept_stamps_are_the_same() -> None:
    clean, stamped, log = _recomputed(False), _recomputed(True), _recompute_log()
    again = unpack_stamps(pack_stamps(clean, stamped, log, 7, {5: 6}), clean.trace)
    assert again[4] == {5: 6}
    assert truth(*again) == truth(clean, stamped, log, 7, {5: 6})


def test_attention_scores_are_found_by_their_softmax_and_an_extra_mask_sum_does_not_shift_them() -> None:
    scores, size = (1, 2, 8, 8), MIB
    log = {
        "operators": [
            _operator("aten.bmm.default", 1, (2, 8, 8), 5),
            _operator("aten.add.Tensor", 2, scores, 5),
            _operator("aten._safe_softmax.default", 3, scores, 5),
            _operator("aten._to_copy.default", 4, scores, 5),
        ],
        "saved": [[3, 4, False], [4, 4, False]],
        "recomputes": [],
    }
    stamped, clean = _Trace(), _Trace()
    for trace in (stamped, clean):
        trace.mark("forward")
        trace.alloc(1, size, "0")
        if trace is stamped:
            trace.alloc(2, size, "1")
            trace.free(1, "1+0")
        trace.alloc(3, size, "2")
        trace.free(2 if trace is stamped else 1, "2+0")
        trace.alloc(4, size, "3")
        trace.mark("backward")
    labels = truth(clean.run(), stamped.run(), log, 7, {})["label"]
    assert labels == ["temporary/forward", "temporary/attention_matrix", "temporary/attention_matrix"]


def test_the_script_that_records_truth_runs(tmp_path: Path) -> None:
    """On the CPU, as CONTRIBUTING.md says: it follows the package's own rooms, which move."""
    pytest.importorskip("torch")
    script = Path(__file__).parents[1] / "gpu" / "record_truth.py"
    command = [sys.executable, str(script), "--one", "penalty_late", "--mode", "clean", "--device", "cpu"]
    subprocess.run([*command, "--work", str(tmp_path), "--checkpoint", str(tmp_path)], check=True, timeout=120)
    made = pickle.loads((tmp_path / "penalty_late.clean.pickle").read_bytes())
    assert made["kind"] == "end" and {label for _, rows in made["identity"] for _, label in rows} == {
        "lora/param", "lora/grad", "lora/optstate",
    }  # fmt: skip


def test_recomputations_are_stamped_where_a_recording_mended_pytorch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.utils.checkpoint")
    from capture_standin import StandIn
    from tools.labelling.stamps import stamping

    from memtrace.record import backend

    monkeypatch.setattr(checkpoint, "_recomputation_hook", checkpoint._recomputation_hook)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    backend._keep_errors_of_recomputations(torch)
    mended = checkpoint._recomputation_hook
    with StandIn() as stand_in, backend.use(stand_in), stamping() as log:
        x = torch.ones(64, requires_grad=True)
        checkpoint.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum().backward()
    assert len(log.recomputes) == 1 and checkpoint._recomputation_hook is mended
