"""Imbalance, alignment of steps, and the odd rank out with its reason."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from support import trace_path

from memtrace.errors import UsageError
from memtrace.ranks.compare import compare_ranks
from memtrace.ranks.odd import Share, Standing, find_odd
from memtrace.ranks.summary import Failure, Rank, StepPeak, summarise

GIB = 1 << 30


@lru_cache(maxsize=8)
def rank(name: str) -> Rank:
    made = summarise(str(trace_path(name)))
    assert isinstance(made, Rank)
    return made


def test_two_ranks_with_other_sequence_lengths() -> None:
    answer = compare_ranks([rank("ddp_rank1"), rank("ddp_rank0")])
    assert [r.rank for r in answer.ranks] == [0, 1] and answer.numbered_by == "recording or file name"
    assert answer.odd is not None and answer.odd.rank == 1
    assert answer.odd.why[0].startswith("activations +1.32 GiB")
    assert "longer sequences" in answer.odd.why[0]
    assert answer.aligned_by == "steps from the start" and answer.compared_step == 1
    assert answer.imbalance["base_weights"].spread_bytes == 0
    assert answer.imbalance["activations"].spread_bytes > GIB
    for standing in answer.compared:
        assert sum(standing.categories.values()) == standing.reserved_bytes


def test_steps_hold_the_peak_of_the_recording() -> None:
    for name in ("ddp_rank0", "tiny-llama_3-steps", "llama2-7b_baseline"):
        summary = rank(name)
        assert max(step.allocated_bytes for step in summary.steps) == summary.peaks["allocated_bytes"]
        assert [step.step for step in summary.steps] == list(range(len(summary.steps)))
        for step in summary.steps:
            assert sum(step.categories.values()) == step.reserved_bytes


def test_a_second_model_is_named_with_its_numbers() -> None:
    base = rank("llama2-7b_baseline")
    ranks = [replace(base, rank=i, file=f"{i}") for i in range(3)]
    ranks.append(replace(rank("llama2-7b_reference-model"), rank=3, file="3"))
    odd = compare_ranks(ranks).odd
    assert odd is not None and odd.rank == 3
    reason = next(line for line in odd.why if line.startswith("base weights"))
    assert "second model" in reason and "times as much" in reason


def standing(number: int, outside: int | None = None, **categories: int) -> Standing:
    full = {"base_weights": 4 * GIB, "activations": 2 * GIB} | categories
    total = sum(full.values())
    return Standing(number, f"rank{number}.pickle", 7, total, total, outside, full)


def test_memory_outside_the_allocator_makes_a_rank_odd() -> None:
    ranks = [standing(i, outside=GIB) for i in range(4)]
    assert find_odd(ranks, "adapters") is None
    odd = find_odd([standing(0, outside=4 * GIB), *ranks[1:]], "adapters")
    assert odd is not None and odd.rank == 0 and odd.excess_bytes == 3 * GIB
    assert odd.why[0].startswith("outside allocator +3.00 GiB") and "NCCL" in odd.why[0]


def test_outside_memory_counts_only_where_every_file_tells_it() -> None:
    assert find_odd([standing(0, outside=9 * GIB), standing(1), standing(2)], "adapters") is None


def test_a_rank_with_less_is_odd_too() -> None:
    odd = find_odd([standing(0), standing(1), standing(2, activations=GIB // 2), standing(3)], "adapters")
    assert odd is not None and odd.rank == 2 and odd.excess_bytes < 0
    assert odd.why[0].startswith("activations -1.50 GiB")


def test_a_run_that_is_uneven_all_over_has_no_odd_rank() -> None:
    assert find_odd([standing(i, activations=(2 + i) * GIB) for i in range(6)], "adapters") is None


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_compare(count: int) -> None:
    answer = compare_ranks([rank("tiny-llama_3-steps")] * count + [Failure("x", "no such file")])
    assert answer.odd is None and len(answer.failed) == 1
    assert "left out: " in answer.sentence


def test_a_number_told_twice_is_refused_with_its_files() -> None:
    base = rank("tiny-llama_3-steps")
    ranks = [replace(base, file=name, rank=number) for name, number in (("b", 1), ("x/a", 0), ("y/a", 0), ("c", None))]
    with pytest.raises(UsageError, match=r"rank 0 stands in x/a and in y/a"):
        compare_ranks(ranks)


@pytest.mark.parametrize(
    ("numbers", "world_size", "missing"),
    [((0, 1, 3), None, (2,)), ((0, 1), 4, (2, 3)), ((1,), 2, (0,)), ((0, 1), 2, ()), ((5,), None, (0, 1, 2, 3, 4))],
)
def test_ranks_without_a_file_are_named(
    numbers: tuple[int, ...], world_size: int | None, missing: tuple[int, ...]
) -> None:
    base = replace(rank("tiny-llama_3-steps"), world_size=world_size)
    answer = compare_ranks([replace(base, file=f"f{n}", rank=n) for n in numbers])
    assert answer.missing == missing and answer.world_size == world_size
    assert all(f"{number}" in answer.sentence for number in missing)
    assert ("no file of rank" in answer.sentence) == bool(missing)


def test_a_rank_whose_file_cannot_be_read_is_not_without_one() -> None:
    base = replace(rank("tiny-llama_3-steps"), world_size=4)
    ranks = [replace(base, file=f"rank{n}.pickle", rank=n) for n in (0, 2)]
    answer = compare_ranks([*ranks, Failure("run/rank3.pickle", "the file is empty")])
    assert answer.missing == (1,)
    assert "(left out: rank3.pickle); no file of rank 1" in answer.sentence


def test_a_file_that_tells_no_rank_is_given_none() -> None:
    base = rank("tiny-llama_3-steps")
    answer = compare_ranks([replace(base, file=f"f{n}", rank=n) for n in (0, None, 1)])
    assert [r.file for r in answer.ranks] == ["f0", "f1"]
    assert [(failure.file, "tell" in failure.error) for failure in answer.failed] == [("fNone", True)]


def test_numbers_of_files_that_tell_none() -> None:
    base = rank("tiny-llama_3-steps")
    answer = compare_ranks([replace(base, file=f"gpu{i}/x.pickle", rank=None) for i in (10, 2, 1)])
    assert [r.file for r in answer.ranks] == ["gpu1/x.pickle", "gpu2/x.pickle", "gpu10/x.pickle"]
    assert answer.missing == ()
    assert [r.rank for r in answer.ranks] == [0, 1, 2] and answer.numbered_by == "order of files"


def step(number: int, peak: int) -> StepPeak:
    return StepPeak(number, 0, peak, peak, {"activations": peak})


def test_steps_of_cut_traces_are_aligned_from_the_end() -> None:
    base = replace(rank("tiny-llama_3-steps"), steps=tuple(step(i, 10 + i) for i in range(5)))
    late = replace(base, truncated=True, steps=(step(0, 13), step(1, 14)))
    answer = compare_ranks([replace(base, rank=0), replace(late, rank=1)])
    assert answer.aligned_by == "steps from the end"
    assert answer.steps[-1].peaks_bytes == (14, 14) and answer.steps[0].peaks_bytes == (10, None)
    assert answer.compared_step == 4


def test_recorded_step_numbers_are_used_as_they_are() -> None:
    base = replace(rank("tiny-llama_3-steps"), steps_recorded=True)
    first = replace(base, rank=0, steps=(step(7, 3), step(8, 9)))
    second = replace(base, rank=1, steps=(step(8, 5), step(9, 4)), truncated=True)
    answer = compare_ranks([first, second])
    assert answer.aligned_by == "recorded steps" and answer.compared_step == 8
    assert [row.peaks_bytes for row in answer.steps] == [(3, None), (9, 5), (None, 4)]


def test_ranks_without_a_common_step_are_compared_at_their_own_events() -> None:
    answer = compare_ranks(
        [replace(rank("tiny-llama_3-steps"), rank=0), replace(rank("llama2-7b_oom-at-load"), rank=1)]
    )
    assert answer.aligned_by == "each rank's own event" and answer.compared_step is None
    assert answer.ranks[1].verdict != "no_oom" and "out of memory on rank 1" in answer.sentence


@pytest.mark.parametrize(("share", "is_odd"), [(0.015, False), (0.025, True), (0.1, True)])
def test_a_rank_is_odd_from_two_percent_on(share: float, is_odd: bool) -> None:
    ranks = [standing(i) for i in range(4)]
    more = standing(4, activations=2 * GIB + int(share * 6 * GIB))
    assert (find_odd([*ranks, more], "adapters") is not None) == is_odd


@pytest.mark.parametrize(("excess", "is_odd"), [(9, False), (11, True)])
def test_a_rank_is_odd_from_five_times_the_unevenness_of_the_others_on(excess: int, is_odd: bool) -> None:
    """The others lie 2 % of 100 GiB from their median."""
    uneven = [standing(i, base_weights=50 * GIB, activations=(48 + 4 * (i % 2)) * GIB) for i in range(4)]
    more = standing(4, base_weights=50 * GIB, activations=(50 + excess) * GIB)
    assert (find_odd([*uneven, more], "adapters") is not None) == is_odd


@pytest.mark.parametrize(("part", "named"), [(17, 1), (23, 2)])
def test_a_part_is_named_from_a_fifth_of_the_difference_on(part: int, named: int) -> None:
    ranks = [standing(i) for i in range(3)]
    more = standing(3, activations=2 * GIB + (100 - part) * GIB // 10, base_weights=4 * GIB + part * GIB // 10)
    odd = find_odd([*ranks, more], "adapters")
    assert odd is not None and len(odd.why) == named


@pytest.mark.parametrize(("times", "second"), [(1.55, False), (1.65, True)])
def test_weights_are_a_second_model_from_sixteen_tenths_on(times: float, second: bool) -> None:
    odd = find_odd([standing(0), standing(1), standing(2, base_weights=int(times * 4 * GIB))], "adapters")
    assert odd is not None and ("second model" in odd.why[0]) == second


MIB = 1 << 20
LAYERS, EMBEDDING = {32 * MIB: 12, 86 * MIB: 9}, {250 * MIB: 1}


@pytest.mark.parametrize(
    ("own", "bytes_more", "said"),
    [
        (LAYERS | EMBEDDING, 250, "1 × 250.0 MiB that most other ranks don't hold: an embedding or a head"),
        ({size: n + n // 3 for size, n in LAYERS.items()}, 386, "28 weights of the same sizes against 21: an uneven"),
        ({86 * MIB: 9}, -384, "12 × 32.0 MiB that most others hold, missing here"),
        ({32 * MIB: 12} | EMBEDDING, -524, "9 × 86.0 MiB that most others hold, missing here"),
        ({32 * MIB: 12} | EMBEDDING, 524, "1 × 250.0 MiB that most other ranks don't hold"),
        ({86 * MIB: 9}, 384, "sharded or quantised elsewhere"),
        ({size: n + n // 3 for size, n in LAYERS.items()}, -386, "a smaller share of the model"),
        (LAYERS, 400, "sharded or quantised elsewhere"),
        ({8 * MIB: 12}, 400, "another program or model: no weight here is of a size that other ranks hold"),
        ({}, 400, "sharded or quantised elsewhere"),
    ],
)
def test_a_rank_is_judged_by_its_part_of_the_model(own: dict[int, int], bytes_more: int, said: str) -> None:
    shares = [*(Share(LAYERS, makes_loss=False) for _ in range(3)), Share(own, makes_loss=False)]
    ranks = [*map(standing, range(3)), standing(3, base_weights=4 * GIB + bytes_more * MIB)]
    odd = find_odd(ranks, "adapters", shares)
    assert odd is not None and odd.rank == 3 and said in odd.why[0]


@pytest.mark.parametrize(("others", "is_last"), [(False, True), (True, False)])
def test_the_last_stage_of_a_pipeline_makes_the_loss(others: bool, is_last: bool) -> None:
    shares = [*(Share(LAYERS, others) for _ in range(3)), Share(LAYERS, makes_loss=True)]
    odd = find_odd([*map(standing, range(3)), standing(3, temporary=GIB)], "adapters", shares)
    assert odd is not None and ("last stage of a pipeline" in odd.why[0]) == is_last


def test_what_a_rank_has_of_the_model_is_read_from_its_recording() -> None:
    made = rank("tiny-llama_3-steps")
    assert (
        made.makes_loss and sum(size * n for size, n in made.weights.items()) <= made.categories["base_weights"] * 1.1
    )
    assert min(made.weights) == 88_064  # norms (2,048) and the smaller adapters (32,768) are left out
    assert not rank("llama2-7b_oom-at-load").makes_loss
