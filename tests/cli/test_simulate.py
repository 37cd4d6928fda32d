"""``memtrace simulate`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from allocator_recordings import ROOT, SAMPLES

from memtrace.cli import main

TINY = str(SAMPLES / "tiny-llama_3-steps.pickle.xz")
FRAGMENTED = str(SAMPLES / "llama2-7b_oom-fragmentation.pickle.xz")
LATE = str(SAMPLES / "llama2-7b_recorded-after-load.pickle.xz")
FUZZ = str(ROOT / "truth" / "fuzz" / "fuzz_capped_0.pickle.xz")


def run(capsysbinary: pytest.CaptureFixture[bytes], *args: str, code: int = 0) -> tuple[str, str]:
    assert main(["simulate", *args]) == code
    out, err = capsysbinary.readouterr()
    return out.decode(), err.decode()


def answer(capsysbinary: pytest.CaptureFixture[bytes], *args: str) -> dict[str, Any]:
    out, _ = run(capsysbinary, *args, "--json")
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


def test_keys_of_the_contract(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    result = answer(capsysbinary, TINY, "--conf", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert result["self_check"]["exact"] is True
    assert result["self_check"]["diverged_at"] is None
    assert result["self_check"]["why"] is None
    assert result["recorded"] == {"peak_allocated_bytes": 365790208, "peak_reserved_bytes": 392167424, "num_ooms": 0}
    assert [one["conf"] for one in result["runs"]] == ["", "expandable_segments:True"]
    for one in result["runs"]:
        assert set(one) >= {
            "conf", "capacity_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "end_reserved_bytes",
            "num_alloc_retries", "num_ooms", "first_oom_event", "segment_allocs", "fits",
        }  # fmt: skip
    first = result["runs"][0]
    assert (first["peak_allocated_bytes"], first["peak_reserved_bytes"]) == (365790208, 392167424)
    assert first["fits"] is True and first["capacity_bytes"] is None and first["first_oom_event"] is None


def test_the_recorded_oom_is_predicted_and_expandable_segments_survive_it(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    result = answer(capsysbinary, FRAGMENTED, "--conf", "expandable_segments:True", "--quick")
    assert result["self_check"]["exact"] and result["self_check"]["predicted"]
    recorded, other = result["runs"]
    assert recorded["first_oom_event"] == 250595 and not recorded["fits"] and recorded["num_ooms"] == 1
    assert recorded["peak_reserved_bytes"] == 23672651776
    assert other["fits"] and other["survived_oom_events"] == [250595] and other["num_alloc_retries"] == 0
    assert other["peak_reserved_bytes"] == 22219325440
    assert other["ends_at_recorded_oom"]


def test_text_says_the_same(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    out, err = run(capsysbinary, FRAGMENTED, "--conf", "expandable_segments:True", "--quick")
    assert "self-check: exact" in out
    assert "OOM at event 250,595" in out
    assert "passes the OOM" in out
    assert "22.05 GiB" in out and "20.69 GiB" in out
    assert "the limit is not recorded" in out
    assert err == ""


def test_capacity_limits_the_first_run_too(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    result = answer(capsysbinary, FUZZ, "--capacity", "2GiB", "--quick")
    (only,) = result["runs"]
    assert only["capacity_bytes"] == 2 << 30
    assert not only["fits"]
    assert only["peak_reserved_bytes"] <= 2 << 30
    plenty = answer(capsysbinary, FUZZ, "--capacity", "40GiB", "--quick")["runs"][0]
    assert plenty["fits"] and plenty["capacity_bytes"] == 40 << 30


def test_ranges_over_driver_addresses(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    result = answer(capsysbinary, FUZZ, "--conf", "max_split_size_mb:64")
    for one in result["runs"]:
        assert one["peak_reserved_low_bytes"] <= one["peak_reserved_bytes"] <= one["peak_reserved_high_bytes"]


def test_search_ranks(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    runs = answer(capsysbinary, FUZZ, "--search", "--quick")["runs"]
    assert len(runs) > 8
    fits = [one["fits"] for one in runs[1:]]
    assert fits == sorted(fits, reverse=True)


def test_edits(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    whole, without, scaled = (
        answer(capsysbinary, TINY, "--quick", *more)["runs"][-1]
        for more in ((), ("--without", "base_weights"), ("--scale", "base_weights=0.5"))
    )
    assert without["edits"] == ["without base_weights"]
    assert without["peak_allocated_bytes"] < scaled["peak_allocated_bytes"] < whole["peak_allocated_bytes"]
    by_site = answer(capsysbinary, TINY, "--quick", "--without", "modeling_llama.py")["runs"]
    assert len(by_site) == 2
    assert by_site[1]["lower_bounds"]["requested_bytes"] <= by_site[0]["lower_bounds"]["requested_bytes"]


def test_what_no_setting_can_go_below_is_of_the_edited_program(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    whole = answer(capsysbinary, TINY, "--quick")
    edited = answer(capsysbinary, TINY, "--quick", "--without", "base_weights")
    assert edited["lower_bounds"]["placement_bytes"] < whole["lower_bounds"]["placement_bytes"]
    assert edited["lower_bounds"]["placement_bytes"] <= edited["runs"][1]["peak_reserved_bytes"]
    out, _ = run(capsysbinary, TINY, "--quick", "--without", "base_weights")
    assert "PyTorch's defaults, without base_weights" in out and "live blocks of the edited program" in out


def test_the_table_fits_and_names_settings_whole(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = run(capsysbinary, FUZZ, "--search", "--capacity", "2GiB")
    table = out[: out.index("limit on reserved memory")].splitlines()
    assert max(map(len, table[table.index("") :])) <= 80
    assert out.count("PyTorch's defaults") == 1
    assert "expandable_segments:True,roundup_power2_divisions:16\n" in out
    assert "(0.0%)" not in out


def test_edits_of_what_was_there_before_the_trace(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    runs = answer(capsysbinary, LATE, "--quick", "--without", "base_weights")["runs"]
    assert runs[0]["peak_allocated_bytes"] - runs[1]["peak_allocated_bytes"] > 3 << 30


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--conf", "max_split_size_mb:5"), 2, "CachingAllocator option max_split_size_mb too small, must be >= 20"),
        (("--conf", "expandable_segments=True"), 2, "a setting is written KEY:VALUE, as in expandable_segments:True"),
        (("--conf", "expandable_segments:true"), 2, "write expandable_segments:True"),
        (("--conf", "expandable_segment:True"), 2, "did you mean expandable_segments?"),
        (("--torch", "1.0"), 2, "the rules of releases 1.10 to"),
        (("--conf", "nonsense:1"), 2, "Unrecognized key 'nonsense' in Accelerator allocator config."),
        (("--conf", "backend:cudaMallocAsync"), 4, "not modelled"),
        (("--capacity", "lots"), 2, "not a size"),
        (("--scale", "logits"), 2, "--scale takes WHAT=FACTOR"),
        (("--without", "no such thing"), 4, "no allocation is of 'no such thing'"),
        (("--torch", "new"), 2, "--torch takes a release"),
    ],
)
def test_errors_are_one_line(
    capsysbinary: pytest.CaptureFixture[bytes], args: tuple[str, ...], code: int, message: str
) -> None:
    out, err = run(capsysbinary, TINY, *args, code=code)
    assert out == ""
    assert err.startswith("memtrace: ") and err.count("\n") == 1
    assert message in err


def test_a_release_can_be_chosen(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    _, err = run(capsysbinary, TINY, "--torch", "2.0", "--conf", "expandable_segments:True", code=2)
    assert "Unrecognized CachingAllocator option: expandable_segments" in err


def test_an_exported_run_opens(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    target = tmp_path / "run.pickle"
    args = (TINY, "--conf", "expandable_segments:True", "--quick", "--export", str(target))
    first = answer(capsysbinary, *args)
    out, _ = run(capsysbinary, *args, code=2)
    assert out == ""  # never overwritten without --force
    again = answer(capsysbinary, str(target), "--quick")
    assert again["self_check"]["exact"] and again["self_check"]["predicted"]
    assert again["runs"][0]["peak_reserved_bytes"] == first["runs"][1]["peak_reserved_bytes"]
    run(capsysbinary, TINY, "--quick", "--export", str(tmp_path / "x.pickle"), "--run", "7", code=2)


def test_no_trace(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    file = tmp_path / "bare.json"
    block = {"address": 1 << 40, "size": 2 << 20, "requested_size": 5, "state": "active_allocated", "frames": []}
    segment = {
        "device": 0, "address": 1 << 40, "total_size": 2 << 20, "allocated_size": 2 << 20, "active_size": 2 << 20,
        "requested_size": 5, "stream": 0, "segment_type": "small", "segment_pool_id": [0, 0], "is_expandable": False,
        "frames": [], "blocks": [block],
    }  # fmt: skip
    file.write_text(json.dumps({"segments": [segment], "device_traces": [[]]}))
    _, err = run(capsysbinary, str(file), code=4)
    assert "no trace" in err
