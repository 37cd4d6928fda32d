"""The HTML page in a real browser (Debian's chromium), without a network: it draws, sorts, reads out, and is silent."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import analysis

from memtrace.export.html.page import html_report
from memtrace.history.timeline import choose_event

CHROMIUM = shutil.which("chromium") or "chromium"
PROBE = """
<script>
const facts = {};
const charts = document.querySelectorAll("svg");
facts.charts = charts.length;
facts.drawn = Array.from(charts).map(c => c.getBoundingClientRect().height > 20);
const colour = kind => getComputedStyle(document.querySelector("svg ." + kind)).fill;
facts.colours = [colour("activations"), colour("base_weights")];
const rows = () => Array.from(document.querySelectorAll("table.sites tbody tr"));
const column = () => rows().map(row => Number(row.cells[0].dataset.value));
const head = document.querySelector("table.sites th[data-sort]");
facts.first = column();
head.click();
facts.down = column();
head.click();
facts.up = column();
const block = document.querySelector("svg rect.activations");
block.dispatchEvent(new MouseEvent("mousemove", { bubbles: true }));
facts.readout = document.getElementById("readout").textContent;
const time = document.querySelector("svg.time");
time.dispatchEvent(new KeyboardEvent("keydown", { key: "End", bubbles: true }));
facts.timed = document.getElementById("readout").textContent;
const box = document.getElementById("search");
document.dispatchEvent(new KeyboardEvent("keydown", { key: "/" }));
facts.focused = document.activeElement === box;
box.value = "no such frame at all";
box.dispatchEvent(new Event("input"));
facts.found = rows().filter(row => !row.classList.contains("gone")).length;
box.value = "";
box.dispatchEvent(new Event("input"));
const image = document.createElement("img");
image.src = "http://127.0.0.1:9/x.png";
document.addEventListener("securitypolicyviolation", e => {
  facts.blocked = e.violatedDirective;
  document.getElementById("facts").textContent = JSON.stringify(facts);
});
document.body.appendChild(image);
</script><pre id="facts"></pre>
"""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(document after its scripts ran, what the console said)."""
    folder = tmp_path_factory.mktemp("page")
    recording = analysis("llama2-7b_oom-first-step")
    page = html_report(recording, choose_event(recording.timeline, None))
    file = folder / "page.html"
    file.write_text(page.replace("</body>", PROBE + "</body>"))
    result = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", Path(file).as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return result.stdout, result.stderr


def test_it_draws_sorts_and_reads_out(dumped: tuple[str, str]) -> None:
    found = re.search(r'<pre id="facts">(.*?)</pre>', dumped[0], re.DOTALL)
    assert found
    facts = json.loads(html.unescape(found[1]))
    assert facts["charts"] == 2 and facts["drawn"] == [True, True]
    assert len(set(facts["colours"])) == 2
    assert facts["down"] == sorted(facts["first"], reverse=True) and facts["up"] == sorted(facts["first"])
    assert facts["readout"].startswith("activations")
    assert re.match(r"event 15,\d+, step 0, forward: base weights [\d.]+ GiB · ", facts["timed"]), facts["timed"]
    assert facts["focused"] and facts["found"] == 0
    assert facts["blocked"] == "img-src"


def test_its_own_scripts_raise_nothing(dumped: tuple[str, str]) -> None:
    said = [line for line in dumped[1].splitlines() if "CONSOLE" in line]
    assert [line for line in said if "violates the following" not in line] == []


def test_a_narrow_window_scrolls_only_the_chart_sideways_and_breaks_no_call_site(tmp_path: Path) -> None:
    recording = analysis("llama2-7b_oom-first-step")
    page = html_report(recording, choose_event(recording.timeline, None))
    probe = """<script>
        const cells = Array.from(document.querySelectorAll(".sites td.code"));
        const least = Math.round(Math.min(...cells.map(cell => cell.getBoundingClientRect().width)));
        document.title = [document.documentElement.scrollWidth, window.innerWidth, least].join("/");
    </script>"""
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", probe + "</body>"))
    result = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=500,2000", "--virtual-time-budget=3000", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r"<title>(\d+)/(\d+)/(\d+)</title>", result.stdout)
    assert found and int(found[1]) <= int(found[2]) == 500
    assert int(found[3]) > 400  # a call site has the whole width
