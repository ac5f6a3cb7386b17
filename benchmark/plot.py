"""Pictures of a sweep: `python -m benchmark.plot results.jsonl --out DIR` -> throughput.png, ttft.png, itl.png and, with SLOs, goodput.png.

Reads the lines that `bench_serving --output-file` appends. A series is a tag (else a backend and dataset); the axis is the request rate, or
--max-concurrency where every line has one rate. Of lines that repeat a point, the line goes through the median and each stays visible.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from radixpd.errors import ConfigError

__all__ = ["draw", "main", "read_lines"]

Line = Mapping[str, Any]
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # told apart also by those who see no red or green
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
SIZE, DPI = (6.4, 4.0), 150


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure over the axis; `aside`: not measured, drawn for comparison."""

    key: str
    label: str
    line: str = "-"
    aside: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Picture:
    """One file. `log`: latencies of a server below and beyond its capacity differ by orders of magnitude."""

    name: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    log: bool = False


THROUGHPUT = Picture(
    "throughput", "Throughput", "tokens/s", (Curve("output_throughput", "output"), Curve("offered", "offered", aside=True))
)
TTFT = Picture("ttft", "Time to first token", "ms", (Curve("median_ttft_ms", "p50"), Curve("p99_ttft_ms", "p99", line="--")), log=True)
ITL = Picture("itl", "Inter-token latency", "ms", (Curve("median_itl_ms", "p50"), Curve("p99_itl_ms", "p99", line="--")), log=True)
GOODPUT = Picture("goodput", "Requests within every objective", "%", (Curve("slo_attainment", "attainment", scale=100.0),))


def read_lines(paths: Sequence[str]) -> list[Line]:
    """Every run in these files."""
    lines: list[Line] = []
    for path in paths:
        try:
            texts = Path(path).read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        for number, text in enumerate(texts, start=1):
            try:
                lines.append(msgspec.json.decode(text, type=dict[str, Any]))
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    if not lines:
        raise ConfigError("no runs in the files given")
    return lines


def axis_of(lines: Sequence[Line]) -> tuple[str, str]:
    """The key that the lines differ in, and its name."""
    if all(isinstance(line.get("request_rate"), (int, float)) for line in lines):
        return "request_rate", "request rate (requests/s)"
    if all(line.get("max_concurrency") is not None for line in lines):
        return "max_concurrency", "max concurrency"
    raise ConfigError("the runs have neither a finite --request-rate each nor a --max-concurrency each")


def series_of(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines by what they measured."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.get("tag") or f"{line['backend']}, {line['dataset_name']}", []).append(line)
    return found


def draw(lines: Sequence[Line], directory: Path) -> list[Path]:
    """The PNG files, newly written."""
    key, name = axis_of(lines)
    series = series_of([{**line, "offered": _offered(line, key)} for line in lines])
    directory.mkdir(parents=True, exist_ok=True)
    pictures = [THROUGHPUT, TTFT, ITL, *([GOODPUT] if any("slo_attainment" in line for line in lines) else [])]
    return [_picture(picture, series, key, name, directory) for picture in pictures]


def _offered(line: Line, key: str) -> float | None:
    """Output tokens per second that the clients asked for: what throughput follows until the server is full."""
    return line["request_rate"] * line["total_output_tokens"] / line["completed"] if key == "request_rate" and line["completed"] else None


def _picture(picture: Picture, series: Mapping[str, Sequence[Line]], key: str, name: str, directory: Path) -> Path:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for (label, lines), color in zip(series.items(), COLORS * len(series)):
            for curve in picture.curves:
                parts = [label] if len(series) > 1 else []
                parts += [curve.label] if len(picture.curves) > 1 else []
                _curve(axes, curve, lines, key, color, " ".join(parts) or "_")
        _dress(axes, picture, series, key, name)
        path = directory / f"{picture.name}.png"
        figure.savefig(path, dpi=DPI)
    return path


def _curve(axes: Axes, curve: Curve, lines: Sequence[Line], key: str, color: str, label: str) -> None:
    points: dict[float, list[float]] = {}
    for line in lines:
        if (value := line.get(curve.key)) is not None:
            points.setdefault(float(line[key]), []).append(value * curve.scale)
    if not points:
        return
    xs = sorted(points)
    middle = [median(points[x]) for x in xs]
    if curve.aside:
        axes.plot(xs, middle, ":", color="#888888", label=label)
        return
    axes.plot(xs, middle, curve.line, color=color, marker="o", markersize=5, label=label)
    repeated = [(x, y) for x, ys in points.items() if len(ys) > 1 for y in ys]
    if repeated:
        axes.scatter([x for x, _ in repeated], [y for _, y in repeated], s=9, color=color, alpha=0.4, linewidths=0)


def _dress(axes: Axes, picture: Picture, series: Mapping[str, Sequence[Line]], key: str, name: str) -> None:
    subtitle = next(iter(series)) if len(series) == 1 else ""
    axes.set_title(f"{picture.title} ({picture.unit})", loc="left", fontweight="bold")
    axes.set_title(subtitle, loc="right", fontsize=9, color="#666666")
    axes.set_xlabel(name)
    xs = sorted({float(line[key]) for lines in series.values() for line in lines})
    if len(xs) > 2 and xs[-1] / xs[0] >= 8:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, minor=False)
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(_plain)
    if picture.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(_plain)
    else:
        axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def _plain(value: float, _: float) -> str:
    return f"{value:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.plot", description="Draw the runs of bench_serving.", allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON lines that --output-file has appended")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the PNG files go")
    args = parser.parse_args(argv)
    try:
        for path in draw(read_lines(args.files), args.out):
            print(path)
    except ConfigError as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
