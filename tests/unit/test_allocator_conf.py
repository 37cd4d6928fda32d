"""PyTorch's settings strings, and the texts with which it refuses bad ones."""

from __future__ import annotations

import pytest

from memtrace.allocator.conf_text import ConfError, parse_conf
from memtrace.allocator.config import AllocatorConfig, conf_string, fraction_limit, from_snapshot

MIB = 1 << 20


def test_a_full_string() -> None:
    config = parse_conf(
        " max_split_size_mb: 128 , garbage_collection_threshold:0.6,expandable_segments:True,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_non_split_rounding_mb:64"
    )
    assert config.max_split_bytes == 128 * MIB
    assert config.max_non_split_rounding_bytes == 64 * MIB
    assert config.gc_threshold == 0.6
    assert config.expandable_segments
    assert config.roundup_divisions == (1,) * 9 + (2, 4) + (8,) * 5


def test_gaps_and_the_rest_in_a_roundup_list() -> None:
    text = "roundup_power2_divisions:[64:8,256:4,1024:4,>:1]"
    assert parse_conf(text, (2, 11)).roundup_divisions == (8,) * 7 + (0, 4, 0, 4) + (1,) * 5
    # Older parsers let ">" overwrite the last listed interval.
    assert parse_conf(text, (2, 4)).roundup_divisions == (8,) * 7 + (0, 4, 0) + (1,) * 6


@pytest.mark.parametrize(
    ("text", "version", "error"),
    [
        ("max_split_size_mb:20", (2, 9), "CachingAllocator option max_split_size_mb too small, must be > 20"),
        ("max_split_size_mb:19", (2, 11), "CachingAllocator option max_split_size_mb too small, must be >= 20"),
        ("large_segment_size_mb:10", (2, 11), "CachingAllocator option large_segment_size_mb must be > 10 MB"),
        (
            "large_segment_size_mb:40,max_split_size_mb:30",
            (2, 11),
            "CachingAllocator option max_split_size_mb too small, must be >= 40",
        ),
        ("garbage_collection_threshold:0", (2, 1), "garbage_collect_threshold too small, set it 0.0~1.0"),
        ("garbage_collection_threshold:1.0", (2, 1), "garbage_collect_threshold too big, set it 0.0~1.0"),
        ("garbage_collection_threshold:2", (2, 12), "garbage_collect_threshold is invalid, set it in (0.0, 1.0)"),
        ("expandable_segments:true", (2, 5), "Expected a single True/False argument for expandable_segments"),
        (
            "expandable_segments:true",
            (2, 12),
            "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got 'true'",
        ),
        ("max_split:1", (2, 9), "Unrecognized CachingAllocator option: max_split"),
        ("max_split:1", (2, 10), "Unrecognized key 'max_split' in Accelerator allocator config."),
        ("expandable_segments:True", (2, 0), "Unrecognized CachingAllocator option: expandable_segments"),
        ("max_split_size_mb=64", (2, 5), "Unrecognized CachingAllocator option: max_split_size_mb=64"),
        ("max_split_size_mb", (2, 5), "Error parsing CachingAllocator settings, expected :"),
        ("max_split_size_mb:", (2, 5), "Error, expecting max_split_size_mb value"),
        ("max_split_size_mb:", (2, 12), "Index out of bounds in ConfigTokenizer"),
        ("roundup_power2_divisions:3", (2, 12), "For roundups, the divisions has to be power of 2 "),
        ("roundup_power2_divisions:[3:4]", (2, 12), "For roundups, the intervals have to be power of 2 "),
        (
            "roundup_power2_divisions:[4:3]",
            (2, 12),
            "For roundups, the divisions has to be power of 2 or 0 to disable roundup ",
        ),
        (
            "roundup_power2_divisions:[4:4",
            (2, 12),
            "Expected closing bracket ']' in ConfigTokenizer but reached end of config",
        ),
        ("backend:cuda", (2, 12), "Unknown allocator backend, options are native and cudaMallocAsync"),
        (
            "per_process_memory_fraction:1.5",
            (2, 12),
            "per_process_memory_fraction is invalid, set it in [0.0, 1.0]",
        ),
        ("pinned_num_register_threads:3", (2, 12), "Number of register threads has to be power of 2, got 3"),
    ],
)
def test_refusals_in_pytorchs_words(text: str, version: tuple[int, int], error: str) -> None:
    with pytest.raises(ConfError) as caught:
        parse_conf(text, version)
    assert str(caught.value) == error


def test_numbers_as_cpp_reads_them() -> None:
    assert parse_conf("max_split_size_mb:64abc", (2, 5)).max_split_bytes == 64 * MIB
    assert parse_conf("max_split_size_mb:-1", (2, 12)).max_split_bytes is None  # wraps to the largest size
    with pytest.raises(ConfError, match="stoull"):
        parse_conf("max_split_size_mb:abc", (2, 12))
    with pytest.raises(ConfError, match="stoi"):
        parse_conf("max_split_size_mb:9999999999", (2, 5))


def test_settings_without_effect_on_placement_are_accepted() -> None:
    text = "release_lock_on_cudamalloc:True,pinned_use_background_threads:False,pinned_num_register_threads:8"
    assert parse_conf(text, (2, 12)) == AllocatorConfig(version=(2, 12))


def test_large_segments_move_the_rounding_of_oversize_blocks() -> None:
    config = parse_conf("max_split_size_mb:64,large_segment_size_mb:40", (2, 12))
    assert (config.large_segment_bytes, config.max_non_split_rounding_bytes) == (40 * MIB, 40 * MIB)


def test_fractions_need_the_card() -> None:
    card = 80 << 30
    assert parse_conf("per_process_memory_fraction:0.5", (2, 12)).limit_bytes is None
    assert parse_conf("per_process_memory_fraction:0.5", (2, 12), card).limit_bytes == 40 << 30
    assert fraction_limit(1.0, card, (2, 10)) is None
    assert fraction_limit(1.0, card, (2, 9)) == card
    assert parse_conf("throw_on_cudamalloc_oom:True", (2, 12), card).preempt_bytes == card
    assert parse_conf("expandable_segments_reserve:40G", (2, 15), card).reservation_bytes == 40 << 30
    assert parse_conf("", (2, 15), card).reservation_bytes == 90 << 30


def test_recorded_settings() -> None:
    recorded = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:100,max_non_split_rounding_mb:64",
        "max_split_size": 100 * MIB,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "roundup_power2_divisions": {str(1 << i): 4 for i in range(16)},
    }
    config = from_snapshot(recorded)
    assert config.max_split_bytes == 100 * MIB
    assert config.max_non_split_rounding_bytes == 64 * MIB
    assert config.roundup_divisions == (4,) * 16
    assert from_snapshot({}) == AllocatorConfig()
    assert from_snapshot({"max_split_size": "x", "roundup_power2_divisions": 3}) == AllocatorConfig()


def test_the_first_variable_that_is_set_wins() -> None:
    assert conf_string({"PYTORCH_ALLOC_CONF": "b", "PYTORCH_CUDA_ALLOC_CONF": "a"}) == "a"
    assert conf_string({"PYTORCH_ALLOC_CONF": "b"}) == "b"
    assert conf_string({}) == ""
