"""OOM help in Chinese: whole, with the same figures, and beside the English."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
from support import shared_recordings, trace_path

from memtrace.attribution.phases import Phase
from memtrace.cli import main
from memtrace.explain import detectors
from memtrace.explain.answer import Basis
from memtrace.explain.detectors.detector import DETECTORS
from memtrace.render import words
from memtrace.render.chinese import BASIS, CONFIDENCE, FINDINGS, PHASES, VERDICTS, render_chinese, wants_chinese
from memtrace.session import open_file

DOCS = Path(__file__).resolve().parents[2] / "docs"
OOM = str(trace_path("llama2-7b_oom-fragmentation"))
SMALLER = str(trace_path("llama2-7b_oom-first-step"))


@pytest.fixture(scope="module", autouse=True)
def each_recording_is_read_once() -> Iterator[None]:
    with shared_recordings():
        yield


def test_every_finding_has_its_chinese() -> None:
    for module in iter_modules(detectors.__path__):
        import_module(f"memtrace.explain.detectors.{module.name}")
    pages = {page.stem for page in (DOCS / "findings").glob("*.md")} - {"README"}
    assert set(FINDINGS) == pages | set(DETECTORS)
    for title, change in FINDINGS.values():
        assert re.search(r"[\u4e00-\u9fff]", title) and re.search(r"[\u4e00-\u9fff]", change)
    assert len({title for title, _ in FINDINGS.values()}) == len(FINDINGS)


def test_every_word_of_an_answer_has_its_chinese() -> None:
    assert set(VERDICTS) == set(words._VERDICTS)
    assert set(BASIS) == set(Basis)
    assert set(PHASES) == {phase.label for phase in Phase}
    told = re.search(r'"confidence":"([a-z|"]+)"', (DOCS / "contract.md").read_text())
    assert told is None or set(CONFIDENCE) >= set(told[1].replace('"', "").split("|"))


def test_the_figures_are_those_of_the_answer() -> None:
    answer = open_file(OOM).explain()
    lines = list(render_chinese(answer))
    assert lines[0] == "显存碎片（实测）：空闲显存足够，但都是零散的小块 · 前向传播，第 10 步"
    assert "1.83 GiB" in lines[1] and "variable_length_fragmentation" in lines[1]
    assert "可省 1.44 GiB" in lines[2] and "expandable_segments:True" in lines[2]
    assert len(list(render_chinese(answer, None))) >= len(lines)


@pytest.mark.parametrize(
    ("lang", "environment", "wanted"),
    [
        (None, {}, False),
        (None, {"LANG": "zh_CN.UTF-8"}, True),
        (None, {"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, False),
        (None, {"LANG": "C", "LC_MESSAGES": "zh_TW"}, True),
        ("en", {"LANG": "zh_CN.UTF-8"}, False),
        ("zh", {}, True),
    ],
)
def test_who_gets_it(lang: str | None, environment: dict[str, str], wanted: bool) -> None:
    assert wants_chinese(lang, environment) is wanted


def test_it_stands_beside_the_english(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    said = {}
    for lang in ("en", "zh"):
        assert main(["explain", SMALLER, "--lang", lang]) == 0
        said[lang] = capsys.readouterr().out
    assert said["zh"].endswith("\n\n" + said["en"]) and said["zh"].startswith("显存不足")
    assert main(["explain", SMALLER, "--lang", "fr"]) == 2
    log = tmp_path / "train.log"
    log.write_text("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; "
                   "22.00 GiB already allocated; 1.00 GiB free; 22.10 GiB reserved in total by PyTorch)\n")  # fmt: skip
    assert main(["explain", str(log), "--lang", "zh"]) == 0
    assert capsys.readouterr().out.startswith("显存不足")
