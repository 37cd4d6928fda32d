"""``memtrace estimate``: contract keys, width, exit codes, files."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import shared_recordings

from memtrace.analysis import PREDICTED
from memtrace.cli import main
from memtrace.estimate.estimate import RESERVED_MARGIN_PERCENT, estimate, verdict
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import gpu_preset, model_preset
from memtrace.estimate.source import ShapeSource

BASE = ["estimate", "--model", "tiny-llama", "--seq-len", "256"]
CONTRACT = {
    "peak_requested_bytes", "peak_allocated_bytes", "peak_phase", "categories", "terms", "affine", "fits", "against",
}  # fmt: skip


def run_json(capsysbinary: pytest.CaptureFixture[bytes], *extra: str) -> dict[str, object]:
    assert main([*BASE, "--json", *extra]) == 0
    out, err = capsysbinary.readouterr()
    assert err == b"" or err.startswith(b"memtrace: written ")
    found: dict[str, object] = json.loads(out)
    return found


def test_json_has_the_contract_keys(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    found = run_json(capsysbinary)
    assert set(found) >= CONTRACT
    assert found["against"] is None
    fits = found["fits"]
    assert isinstance(fits, dict) and {"capacity_bytes", "margin_bytes"} <= set(fits)
    affine = found["affine"]
    assert isinstance(affine, dict) and {"constant_bytes", "per_token_bytes"} <= set(affine)
    terms = found["terms"]
    assert isinstance(terms, list) and all({"name", "bytes", "formula", "category"} <= set(term) for term in terms)


def test_every_option_is_taken(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    plain = run_json(capsysbinary)
    for extra in (
        ["--rank", "64"], ["--targets", "q_proj,v_proj"], ["--dropout", "0"], ["--optim", "adamw_8bit"],
        ["--attn", "eager"], ["--no-checkpointing"], ["--no-prepare-kbit"], ["--autocast"],
        ["--adapter-dtype", "bf16"], ["--reentrant"], ["--keep-logits"], ["--loss", "fused"], ["--quant", "none"],
        ["--batch", "2"],
    ):  # fmt: skip
        assert run_json(capsysbinary, *extra)["phases"] != plain["phases"], extra


def test_text_is_at_most_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ([], ["--batch", "64", "--no-checkpointing", "--capacity", "4GiB"], ["--gpu", "t4", "--autocast"]):
        assert main([*BASE, *extra]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        assert "FIT" in text and "base_weights" in text


def test_trace_and_against(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    out = tmp_path / "predicted.pickle"
    first = run_json(capsysbinary, "--trace", str(out))
    assert out.stat().st_size > 0
    assert main([*BASE, "--trace", str(out)]) == 2  # exists; --force overwrites it
    capsysbinary.readouterr()
    found = run_json(capsysbinary, "--against", str(out))
    against = found["against"]
    assert isinstance(against, dict)
    assert against["signed_error_bytes"] == 0 and against["signed_error_percent"] == 0
    assert {"by_category", "budget_distortion"} <= set(against)
    assert first["categories"] == found["categories"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--model", "no-such-model", "--seq-len", "128"], 2),
        (["--model", "tiny-llama", "--seq-len", "0"], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--gpu", "abacus"], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--capacity", "much"], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--targets", "nope"], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--against", "/nowhere.pickle"], 3),
        (["--model", "/nowhere/config.json", "--seq-len", "128"], 3),
        (["--model", "", "--seq-len", "128"], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--gpu", ""], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--capacity", ""], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--capacity", "0"], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--targets", " ,"], 2),
        (["--model", "tiny-llama", "--seq-len", "128", "--against", ""], 3),
        (["--model", "tiny-llama", "--seq-len", "128", "--batch", "1000000"], 2),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_moe_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8, "hidden_size": 4096}))
    assert main(["estimate", "--model", str(config), "--seq-len", "128"]) == 2
    assert "mixture of experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "asked", "meant"),
    [
        ("--model", "meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("--model", "Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("--gpu", "4090", "rtx4090"),
        ("--gpu", "A100-80GB", "a100-80g"),
        ("--gpu", "a100", "a100-40g or a100-80g"),
    ],
)
def test_unknown_presets_name_what_was_meant(
    option: str, asked: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, option, asked]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_every_verb_says_that_a_predicted_run_was_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "predicted.pickle")
    assert main([*BASE, "--trace", out]) == 0
    capsys.readouterr()
    with shared_recordings(tmp_path):
        for args in (["info", out], ["report", out], ["explain", out], ["diff", out, out], ["ranks", out]):
            assert main(args) == 0
            assert PREDICTED in " ".join(capsys.readouterr().out.split()), args
            assert main([*args, "--json"]) == 0
            text = capsys.readouterr().out
            assert PREDICTED in text or (args[0] == "ranks" and json.loads(text)["ranks"][0]["predicted"]), args


@pytest.mark.parametrize(
    "asked",
    [
        ["--model", "tiny-llama", "--seq-len", "2048", "--batch", "4", "--no-checkpointing", "--capacity", "4GiB"],
        ["--model", "tinyllama-1.1b", "--seq-len", "3000", "--batch", "2", "--no-checkpointing", "--gpu", "t4"],
        ["--model", "tinyllama-1.1b", "--seq-len", "1500", "--rank", "64", "--capacity", "3500MiB", "--quant", "none"],
    ],
)
def test_an_advice_says_what_the_command_says_when_it_is_followed(
    asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = functools.cache(estimate)
    monkeypatch.setattr("memtrace.estimate.estimate.estimate", once)

    def answer(*more: str) -> tuple[dict[str, Any], str]:
        once.cache_clear()
        assert main(["estimate", *asked, *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["estimate", *asked, *more]) == 0
        return found, " ".join(capsys.readouterr().out.split())

    found, text = answer()
    assert not found["fits"]["fits"] and found["changes"]
    monkeypatch.setattr("memtrace.estimate.advice.advise", lambda found: ())  # the followed runs need no advice
    for change in found["changes"]:
        followed, said = answer(*change["flag"].split())
        assert change["fit"] == followed["fits"]
        assert change["sufficient"] == followed["fits"]["fits"]
        assert change["saves_bytes"] == found["fits"]["device_bytes"] - followed["fits"]["device_bytes"]
        verdict = re.search(r"(?:FITS|DOES NOT FIT).*?(?=\. The peak is)", said)
        assert verdict is not None
        assert re.sub(r": needs \S+ \S+ of \S+ \S+,", ",", verdict[0]) in text


def test_a_verdict_that_is_too_close_is_so_as_advice() -> None:
    """Whatever is left below what the prediction may be wrong by carries the caution."""
    card, source, options = gpu_preset("h200"), ShapeSource(model_preset("tiny-llama")), RunOptions(1024)
    *_, free = verdict(source, options, card, 1 << 40)
    reserved = free.device_bytes - card.outside_bytes
    error = round(reserved * RESERVED_MARGIN_PERCENT / 100)
    near = [verdict(source, options, card, free.device_bytes + more)[2] for more in (0, error - 1, error)]
    assert [fit.too_close for fit in near] == [True, True, False] and all(fit.fits for fit in near)
    assert not verdict(source, options, card, free.device_bytes - 1)[2].too_close
