"""Draw the documentation's pictures of the browser anew: ``python tests/docs/pictures.py`` (needs Chromium).

The application runs without a terminal on the recording of the tutorial. What it shows becomes an SVG, and Chromium
makes a PNG of it with a font of this machine, so that it looks the same everywhere. Look before you commit.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from doc_pages import DOCS, ROOT

sys.path.insert(0, str(ROOT / "tests"))

from browser_cases import hit, settle, until
from memtrace_tui.app import BrowseApp
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.settings import Settings

RECORDING = ROOT / "sample_traces" / "llama2-7b_oom-fragmentation.pickle.xz"
SIZE = (120, 34)
SCREENS = {"overview": "1", "timeline": "2", "segments": "3"}
FONT = "DejaVu Sans Mono"
_PATIENCE_S = 3.0  # for answers that are worked out in the background (the verdict)


async def draw() -> dict[str, str]:
    """SVG text of each screen."""
    app = BrowseApp(
        str(RECORDING), settings=Settings(theme="memtrace-dark"), plain=False, few_colours=False, remember=False
    )
    pictures = {}
    async with app.run_test(size=SIZE) as pilot:
        await until(lambda: isinstance(app.screen, MainScreen))
        for name, key in SCREENS.items():
            await hit(pilot, key)
            await settle(pilot)
            await asyncio.sleep(_PATIENCE_S)
            await settle(pilot)
            pictures[name] = app.export_screenshot(title="memtrace")
    return pictures


def without_seams(svg: str) -> str:
    """Text of block characters drawn a hair wider, so that no dark lines show between cells of fractional width."""
    fills = dict(re.findall(r"\.([\w-]+-r\d+) \{ fill: (#\w+)", svg))

    def widened(match: re.Match[str]) -> str:
        stroke = f'<text style="stroke:{fills.get(match[1], "none")};stroke-width:0.5" '
        return match[0].replace("<text ", stroke, 1)

    return re.sub(r'<text class="([\w-]+)"[^>]*>(?:&#160;|[\u2580-\u259f\u2500\u2501 ])+</text>', widened, svg)


def to_png(svg: str, target: Path) -> None:
    """Write the picture with a font that is here; the SVG names one on the web."""
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", FONT)
    svg = without_seams(svg)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if box is None:
        raise SystemExit("the SVG has no size")
    width, height = (round(float(side)) for side in box.groups())
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("Chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "picture.html"
        style = "html,body{margin:0;background:transparent}svg{display:block}"
        page.write_text(f"<meta charset=utf-8><style>{style}</style>{svg}")
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--default-background-color=00000000",
            f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={target}", str(page),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Draw and write all pictures."""
    for name, svg in asyncio.run(draw()).items():
        to_png(svg, DOCS / "images" / f"browser-{name}.png")
        print(f"docs/images/browser-{name}.png")


if __name__ == "__main__":
    main()
