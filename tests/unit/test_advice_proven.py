"""Every advice of every recording, tried: by our own replay, or by a forecast of the same run. None is refuted."""

from __future__ import annotations

from functools import lru_cache

import pytest
from support import LABELLED, NAMES, TRUTH, analysis

from memtrace.allocator.whatif.selfcheck import recorded_limit
from memtrace.analysis import Analysis
from memtrace.answers.simulate import Question, answer
from memtrace.explain.advice import spelled
from memtrace.explain.answer import Advice, Basis, Explanation
from memtrace.explain.case import Case
from memtrace.explain.detectors import DETECTORS
from memtrace.explain.explain import explain_snapshot
from memtrace.explain.proof import LEAST_SHARE, Bench, Proposal, proven
from memtrace.explain.setting import setting_of_log
from memtrace.explain.snapshot_facts import verdict_at
from memtrace.history.timeline import choose_event
from memtrace.oomlog.scan import LogReading
from memtrace.render.explain_text import render_explanation

FIELD = sorted(path.name.partition(".pickle")[0] for path in (TRUTH / "field").glob("*.pickle*"))
REPLAYED = [*LABELLED, "llama2-7b_oom-first-step", "llama2-7b_oom-fragmentation", "llama2-7b_kept-graphs", *FIELD]


@lru_cache(maxsize=2)
def explained(name: str) -> Explanation:
    return explain_snapshot(analysis(name))


def bench_of(seen: Analysis) -> Bench:
    at = choose_event(seen.timeline, None)
    return Bench(Case(seen, at, *verdict_at(seen, at.event)))


@pytest.mark.parametrize("name", sorted(set(REPLAYED)))
def test_no_advice_is_refuted(name: str) -> None:
    bench = bench_of(analysis(name))
    before = bench.run([]) if bench.can_replay else None
    for detector in DETECTORS.values():
        finding = detector(bench.case)
        if finding is None:
            continue
        tested, held = proven(bench, finding)
        figures = {advice.change: advice for advice in tested.advice}
        for proposal in held:
            said = figures[proposal.change]
            assert said.saves_bytes is not None and said.saves_bytes >= LEAST_SHARE * bench.case.whole_bytes
            assert said.proof and said.basis is not Basis.RULE
            if before is not None:
                _confirm(bench, before, proposal, said)


def _confirm(bench: Bench, before, proposal: Proposal, said: Advice) -> None:
    after = bench.run([proposal])
    assert said.saves_bytes is not None
    if said.basis is Basis.REPLAY:
        assert bench.replayed([proposal])[1] or not bench.case.is_oom
        return
    if said.basis is Basis.FORECAST:
        return
    if bench.case.is_oom and any(not refused.recorded for refused in after.refused):
        # Under the least limit that the recording allows, other pieces lie in other places, and another request was
        # refused before: what is said of this one is looked at where none is.
        free = bench_of(bench.case.analysis)
        free.case.capacity = None
        before, after = free.run([]), free.run([proposal])
    if bench.case.is_oom:
        held = bench.case.refusal.asked_bytes if after.spared and not before.spared else 0
        won = before.end_allocated_bytes - after.end_allocated_bytes + held
    else:
        won = before.peak_allocated_bytes - after.peak_allocated_bytes
    # A formula may leave out what the change costs (less_bytes), so more may be won in the replay than is said.
    assert won >= 0.9 * said.saves_bytes, (proposal.change, won, said.saves_bytes)


def changes(answered: Explanation) -> str:
    return " ".join(advice.change for finding in answered.findings for advice in finding.advice)


@pytest.mark.parametrize("name", sorted({*NAMES, *LABELLED, *FIELD}))
def test_advice_fits_the_run(name: str) -> None:
    seen, answered = analysis(name), explained(name)
    text = changes(answered)
    if not seen.attribution.trains_adapters:
        assert not any(word in text for word in ("prepare_model_for_kbit", "LoraConfig", "adapters")), text
    if not any("/transformers/trainer" in frame.filename for frame in seen.timeline.snapshot.stacks.frames):
        assert not any(word in text for word in ("TrainingArguments", "SFTConfig", "per_device")), text
    for finding in answered.findings:
        assert all(advice.proof for advice in finding.advice if advice.basis is not Basis.RULE)
        assert all((advice.saves_bytes or 0) < 0.011 * 2**40 for advice in finding.tried)


def test_one_capacity_everywhere() -> None:
    """A full card: what the process held and what was free, in the verdict, the advice and simulate."""
    seen = analysis("large-block-split_oom")
    answered = explain_snapshot(seen)
    assert answered.verdict == "fragmentation" and answered.capacity is not None
    simulated = answer(seen.timeline, Question(("expandable_segments:True", "max_split_size_mb:128")))
    assert {run.capacity_bytes for run in simulated.runs} == {answered.capacity.low_bytes}
    assert [run.survived_oom_events != () for run in simulated.runs] == [False, True, True]
    (pieces,) = [finding for finding in answered.findings if finding.id == "reserved_in_pieces"]
    assert [advice.basis for advice in pieces.advice] == [Basis.REPLAY, Basis.REPLAY]
    assert "expandable_segments:True" in pieces.advice[0].change and "max_split_size_mb" in pieces.advice[1].change
    assert answered.together is not None and answered.together.fits
    assert answered.together.enough == ("reserved_in_pieces",)


@pytest.mark.parametrize("name", [name for name in FIELD if name.endswith("_oom")])
def test_an_inferred_limit_is_as_narrow_as_the_one_that_simulate_uses(name: str) -> None:
    """What was refused at first and granted after a flush bounds the limit as what was refused for good does."""
    capacity, limit = explained(name).capacity, recorded_limit(analysis(name).timeline.replay)
    if capacity is not None and capacity.source == "inferred":
        assert capacity.high_bytes < (limit.below_bytes or 0)


def test_changes_that_leave_a_request_refused_say_so_and_no_peak_below_the_limit() -> None:
    answered = explain_snapshot(analysis("trainer-evaluate_oom"))
    whole = answered.together
    assert whole is not None and not whole.fits and whole.peak_bytes < whole.capacity_bytes
    told = [line for line in render_explanation(answered) if line.startswith("together")]
    assert told == ["together: a request is refused all the same under 1.78 GiB (replay)"]


def test_changes_that_do_not_fit_say_how_much_would() -> None:
    answer = explain_snapshot(analysis("trainer_12-layers_oom"))
    assert answer.together is not None and answer.together.tokens_share is not None
    assert "does not fit (forecast), would with 19% of its tokens" in " ".join(render_explanation(answer))
    assert not [line for line in answer.because if line.startswith("At most about")]  # of the layers alone


def test_a_refused_request_shrinks_with_its_like() -> None:
    """The refused request is one more of the logits' size: in tiles, a tile would be asked for."""
    seen = analysis("qwen2-7b_oom-backward")
    bench = bench_of(seen)
    finding = DETECTORS["logits_unchunked"](bench.case)
    assert finding is not None and bench.case.refusal is not None
    _, (tiles,) = proven(bench, finding)
    tile = 4096 * 32768 * 2
    assert tiles.asks_bytes == tile and bench.run([tiles]).spared[-1].block_bytes < 2 * tile
    saved = bench.case.live_total(tiles.rows) + bench.case.refusal.asked_bytes - tile
    assert tiles.saves_bytes == saved


@pytest.mark.parametrize("name", ["fsdp2_oom", "tensor-parallel_oom", "fsdp1_oom"])
def test_no_optimizer_is_advised_that_refuses_dtensors(name: str) -> None:
    """``optimizer.step()`` of bitsandbytes 0.50 refuses what ``fully_shard`` and ``tp_plan`` made."""
    text = changes(explain_snapshot(analysis(name)))
    assert ("bitsandbytes.optim" in text, "torchao" in text) == (name == "fsdp1_oom", name != "fsdp1_oom")


@pytest.mark.parametrize(
    ("file", "change", "said", "is_said"),
    [
        ("torch/distributed/fsdp/_runtime_utils.py", "four_bits", "bnb_4bit_quant_storage=torch.bfloat16", True),
        ("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "four_bits", "bnb_4bit_quant_storage", True),
        ("deepspeed/runtime/zero/partition_parameters.py", "four_bits", "bnb_4bit_quant_storage", True),
        ("torch/nn/parallel/distributed.py", "four_bits", "bnb_4bit_quant_storage", False),
        ("deepspeed/runtime/engine.py", "optim_paged", '"offload_optimizer": {"device": "cpu"}', True),
    ],
)
def test_a_change_is_spelled_for_what_shards(file: str, change: str, said: str, is_said: bool) -> None:
    setting = setting_of_log(LogReading(()), None, [], [f"/usr/lib/python3/dist-packages/{file}"])
    assert (said in spelled(change, setting)) == is_said


def test_layers_come_from_the_recorded_configuration() -> None:
    answered = explain_snapshot(analysis("trainer_12-layers_oom"))
    assert any("6 of 12 layers" in line and "2.46 GiB more" in line for line in answered.because)
    advice = {a.basis for finding in answered.findings for a in finding.advice}
    assert Basis.FORECAST in advice and answered.together is not None and not answered.together.fits
    text = changes(answered)
    assert "TrainingArguments" in text and "SFTConfig" not in text


def test_what_is_forecast_to_save_nothing_is_no_advice_but_said() -> None:
    answered = explain_snapshot(analysis("trainer_12-layers_oom"))
    (branch,) = [finding for finding in answered.findings if finding.id == "fp32_lora_branch"]
    assert any("16 bits" in advice.change for advice in branch.tried)
    assert not any("16 bits" in advice.change for advice in branch.advice)


def test_field_files_are_there() -> None:
    assert {*FIELD} >= {"large-block-split_oom", "trainer_12-layers_oom"}
