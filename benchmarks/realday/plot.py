"""The plot of a run as SVG: seconds to the first token over the length of the prompt."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.realday.results import COMPUTED, FROM_DISK, OWN_HIT, RESTARTED, WAYS, ModelDay

WIDTH, HEIGHT, TOP, LEFT, GAP = 420, 340, 58, 58, 24
COLOURS = {COMPUTED: "#b3261e", OWN_HIT: "#777777", RESTARTED: "#0b57d0", FROM_DISK: "#146c2e"}
DASHES = {OWN_HIT: "5 4"}
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class Panel:
    """The axes of one model, both logarithmic, at a place in the picture."""

    def __init__(self, day: ModelDay, left: float, seconds: tuple[float, float]) -> None:
        """`seconds` are the least and the most that the axis shows."""
        self._day, self._left = day, left
        self._tokens = [prompt.tokens for prompt in day.prompts]
        self._seconds = seconds

    def _x(self, tokens: float) -> float:
        least, most = self._tokens[0], self._tokens[-1]
        share = math.log(tokens / least) / math.log(most / least) if most > least else 0.5
        return self._left + 14 + share * (WIDTH - 28)

    def _y(self, seconds: float) -> float:
        least, most = self._seconds
        return TOP + HEIGHT * (1 - math.log(seconds / least) / math.log(most / least))

    def elements(self) -> Iterator[str]:
        """Yield the SVG elements."""
        left, right, bottom = self._left, self._left + WIDTH, TOP + HEIGHT
        yield f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" class="frame"/>'
        yield f'<text x="{left + WIDTH / 2}" y="{TOP - 10}" class="title">{self._title()}</text>'
        for tick in TICKS:
            if self._seconds[0] <= tick <= self._seconds[1]:
                y = self._y(tick)
                yield f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>'
                yield f'<text x="{left - 6}" y="{y + 4:.1f}" class="tick y">{tick:g} s</text>'
        for tokens in self._tokens:
            x = self._x(tokens)
            yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" class="grid"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 17}" class="tick">{tokens:,}</text>'
        for way in WAYS:
            points = [
                (self._x(prompt.tokens), self._y(prompt.answers[way].first_seconds))
                for prompt in self._day.prompts
            ]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            style = f'stroke="{COLOURS[way]}" stroke-dasharray="{DASHES.get(way, "none")}"'
            yield f'<polyline points="{line}" {style}/>'
            for x, y in points:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[way]}"/>'

    def _title(self) -> str:
        return escape(f"{self._day.model}, {self._day.dtype}")


def picture(days: Sequence[ModelDay], caption: str) -> str:
    """Return an SVG with a panel for each model, and one legend.

    `caption` says below it where the figures are from.
    """
    all_seconds = [
        prompt.answers[way].first_seconds for day in days for prompt in day.prompts for way in WAYS
    ]
    bounds = (min(all_seconds) / 1.4, max(all_seconds) * 1.4)
    width = LEFT + len(days) * (WIDTH + LEFT + GAP)
    height = TOP + HEIGHT + 66
    body = [
        element
        for number, day in enumerate(days)
        for element in Panel(day, LEFT + number * (WIDTH + LEFT + GAP), bounds).elements()
    ]
    for number, way in enumerate(WAYS):
        x = LEFT + number * 150
        dash = DASHES.get(way, "none")
        line = f'stroke="{COLOURS[way]}" stroke-dasharray="{dash}"'
        body.append(f'<line x1="{x}" y1="18" x2="{x + 26}" y2="18" {line} stroke-width="2.5"/>')
        body.append(f'<text x="{x + 32}" y="22" class="legend">{escape(way)}</text>')
    body.append(
        f'<text x="{LEFT}" y="{height - 12}" class="caption">'
        f"Seconds to the first token by tokens of the prompt. {escape(caption)}</text>"
    )
    style = (
        "text{font:12px system-ui,sans-serif;fill:#333}"
        ".title{font-weight:600;font-size:14px;text-anchor:middle}.legend{font-size:13px}"
        ".tick{text-anchor:middle}.y{text-anchor:end}.caption{font-size:11px;fill:#555}"
        ".frame{fill:none;stroke:#999}.grid{stroke:#ddd}polyline{fill:none;stroke-width:2.5}"
    )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )
