"""Make the pictures of docs/images anew: the screens as PNG, and the map playing until it dies as GIF. Needs Pillow.

python tests/docs/pictures.py
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from doc_pages import DOCS, ROOT

sys.path.insert(0, str(ROOT / "tests"))

from browser_cases import hit, main_screen, running, until
from memtrace_tui.app import BrowseApp
from memtrace_tui.provider import BrowsedRecording as Recording
from memtrace_tui.settings import Settings
from PIL import Image, ImageDraw, ImageFont
from textual.strip import Strip

HERE = DOCS / "images"
FILE = "sample_traces/llama2-7b_oom-fragmentation.pickle.xz"
WIDTH, HEIGHT = 9, 19  # pixels of a cell
LOWER, LEFT = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
DARK = (16, 20, 24)


def font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans Mono, which matplotlib brings along."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf", 15)


def draw(strips: list[Strip]) -> Image.Image:
    """A screen as a picture, cell by cell."""
    columns = max(strip.cell_length for strip in strips)
    picture = Image.new("RGB", (columns * WIDTH, len(strips) * HEIGHT), DARK)
    pen, letters = ImageDraw.Draw(picture), font()
    for row, strip in enumerate(strips):
        x, y = 0, row * HEIGHT
        for text, style, _ in strip:
            front = style.color.get_truecolor() if style and style.color else (200, 209, 217)
            back = style.bgcolor.get_truecolor() if style and style.bgcolor else DARK
            for character in text:
                pen.rectangle((x, y, x + WIDTH - 1, y + HEIGHT - 1), fill=tuple(back))
                if character in LOWER:
                    part = LOWER.index(character) * HEIGHT // 8
                    if part:
                        pen.rectangle((x, y + HEIGHT - part, x + WIDTH - 1, y + HEIGHT - 1), fill=tuple(front))
                elif character in LEFT:
                    pen.rectangle((x, y, x + LEFT.index(character) * WIDTH // 8 - 1, y + HEIGHT - 1), fill=tuple(front))
                elif character == "▐":
                    pen.rectangle((x + WIDTH // 2, y, x + WIDTH - 1, y + HEIGHT - 1), fill=tuple(front))
                else:
                    pen.text((x, y), character, font=letters, fill=tuple(front))
                x += WIDTH
    return picture


async def main() -> None:
    """Three screens at the refused request, and the last two steps before it."""
    os.chdir(ROOT)  # so that the pictures name the recording by its path in the repository
    app = BrowseApp(recording=Recording.open(FILE), settings=Settings(), few_colours=False, remember=False)
    async with running(app, (120, 36)) as pilot:
        screen = main_screen(pilot)
        await until(lambda: screen.session.explanation is not None)

        def take() -> Image.Image:
            app.screen._on_timer_update()
            return draw(app.screen._compositor.render_strips())

        for key, name in (("1", "overview"), ("2", "timeline"), ("3", "segments")):
            await hit(pilot, key)
            take().save(HERE / f"browser-{name}.png", optimize=True)
    app = BrowseApp(recording=Recording.open(FILE), settings=Settings(), few_colours=False, remember=False)
    async with running(app, (100, 30)) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "3")
        end = screen.session.provider.count - 1
        start = next(span.start for span in screen.session.provider.spans if span.step == 9)
        frames = []
        for number in range(48):
            screen.go(start + (end - start) * number // 47)
            await hit(pilot, "down" if number == 0 else "f12")
            pilot.app.screen._on_timer_update()
            frames.append(draw(pilot.app.screen._compositor.render_strips()).quantize(64))
        times = [90] * 47 + [2500]
        frames[0].save(HERE / "browser-playing.gif", save_all=True, append_images=frames[1:], duration=times, loop=0,
                       optimize=True)  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
