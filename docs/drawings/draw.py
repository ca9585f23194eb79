"""Draws the worked examples from their own numbers: `python docs/drawings/draw.py` writes all.

Every drawing is made once in English and once in Chinese. A test compares the files with what this
script draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

INK, PALE, GOOD, BAD, MARK = "#24292f", "#d0d7de", "#1a7f37", "#bc4c00", "#0969da"
FONT = "font-family='system-ui, sans-serif' font-size='13'"


class Drawing:
    """An SVG file in one language."""

    def __init__(self, width: int, height: int, is_chinese: bool) -> None:
        self._size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
        self._is_chinese = is_chinese
        self._parts: list[str] = []

    def text(
        self,
        x: int,
        y: int,
        english: str,
        chinese: str | None = None,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        said = chinese if self._is_chinese and chinese is not None else english
        weight = " font-weight='bold'" if bold else ""
        where = f"x='{x}' y='{y}' fill='{color}' text-anchor='{anchor}'{weight}"
        self._parts.append(f"<text {where}>{escape(said)}</text>")

    def line(
        self,
        start: tuple[int, int],
        end: tuple[int, int],
        color: str = INK,
        width: int = 2,
        dashed: bool = False,
        arrow: bool = False,
    ) -> None:
        (x1, y1), (x2, y2) = start, end
        style = f"stroke='{color}' stroke-width='{width}'"
        style += " stroke-dasharray='6 4'" if dashed else ""
        style += f" marker-end='url(#arrow-{color[1:]})'" if arrow else ""
        self._parts.append(f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' {style}/>")

    def box(
        self, x: int, y: int, width: int, height: int, color: str = INK, fill: str = "#fff"
    ) -> None:
        self._parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='4'"
            f" fill='{fill}' stroke='{color}' stroke-width='1.5'/>"
        )

    def lines_in_box(
        self, x: int, y: int, width: int, color: str, *lines: tuple[str, str | None]
    ) -> None:
        """A box as high as its lines; the first is its heading."""
        self.box(x, y, width, 14 + 19 * len(lines), color)
        for number, (english, chinese) in enumerate(lines):
            is_heading = number == 0
            self.text(
                x + 10,
                y + 20 + 19 * number,
                english,
                chinese,
                color if is_heading else INK,
                bold=is_heading,
            )

    def svg(self) -> str:
        arrows = "".join(
            f"<marker id='arrow-{color[1:]}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7'"
            f" markerHeight='7' orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='{color}'/></marker>"
            for color in (INK, PALE, GOOD, BAD, MARK)
        )
        white = "<rect width='100%' height='100%' fill='#fff'/>"
        body = "\n".join(self._parts)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' {self._size} {FONT}>\n"
            f"<defs>{arrows}</defs>\n{white}\n{body}\n</svg>\n"
        )


def amounts(counts: dict[str, int]) -> list[tuple[str, str | None]]:
    return [(f"{app} = {count}", None) for app, count in sorted(counts.items())]


# --- E3 ------------------------------------------------------------------------------------------


def e3(is_chinese: bool) -> str:
    from e3_page_views_from_kafka import AT_1000, AT_1100, HUNDRED, THOUSAND

    safe, lost = len(THOUSAND), len(THOUSAND) + len(HUNDRED)
    drawing = Drawing(790, 315, is_chinese)
    left, barrier, crash, y = 130, 420, 640, 60
    drawing.text(20, y + 5, "partition 0", "分区 0", bold=True)
    drawing.line((left, y), (barrier, y), INK, 10)
    drawing.line((barrier, y), (crash, y), BAD, 10)
    drawing.line((barrier, y - 30), (barrier, 120), MARK, dashed=True)
    drawing.line((crash, y - 30), (crash, 120), BAD, dashed=True)
    drawing.text(barrier, y - 36, "barrier 100", "barrier 100", MARK, "middle")
    drawing.text(crash, y - 36, "crash", "崩溃", BAD, "middle")
    drawing.text(
        (left + barrier) // 2,
        y + 24,
        f"offsets 0 to {safe - 1}",
        f"offset 0 到 {safe - 1}",
        anchor="middle",
    )
    drawing.text(
        (barrier + crash) // 2,
        y + 24,
        f"{safe} to {lost - 1}: lost, done again",
        f"{safe} 到 {lost - 1}：丢失，重做",
        BAD,
        "middle",
    )
    drawing.lines_in_box(
        barrier - 95, 120, 200, MARK,
        ("checkpoint 100 (on disk)", "检查点 100（已落盘）"),
        (f"partition 0, offset {safe}", f"分区 0，offset {safe}"),
        *amounts(AT_1000),
    )  # fmt: skip
    drawing.lines_in_box(
        crash - 75, 120, 190, BAD,
        ("only in memory", "只在内存里"),
        (f"partition 0, offset {lost}", f"分区 0，offset {lost}"),
        *amounts(AT_1100),
    )  # fmt: skip
    drawing.line((crash - 76, 165), (barrier + 108, 165), BAD, arrow=True)
    drawing.text(20, 250, "After the crash: back to checkpoint 100,", "崩溃之后：回到检查点 100，")
    drawing.text(
        20,
        270,
        f"read {safe} to {lost - 1} again. The counts end exact.",
        f"重新读 {safe} 到 {lost - 1}，计数最终精确。",
    )
    drawing.line((barrier, 210), (barrier, 265), GOOD)
    drawing.line((barrier, 265), (crash - 90, 265), GOOD, arrow=True)
    drawing.lines_in_box(
        crash - 85, 230, 215, GOOD,
        ("checkpoint 101", "检查点 101"),
        (f"partition 0, offset {lost}", f"分区 0，offset {lost}"),
        (", ".join(text for text, _ in amounts(AT_1100)), None),
    )  # fmt: skip
    return drawing.svg()


# --- E4 ------------------------------------------------------------------------------------------


def e4(is_chinese: bool) -> str:
    from e4_with_and_without_alignment import AFTER, BEFORE

    offsets = [len(lines) for lines in BEFORE]
    views = [line["app"] for lines in BEFORE for line in lines]
    app0, app1 = views.count("app0"), views.count("app1")
    surplus = sum(line["event"] == "view" for line in AFTER)
    drawing = Drawing(900, 400, is_chinese)
    panels = (
        (0, GOOD, "with alignment (exactly-once)", "对齐（exactly-once）", app1, app1 + surplus),
        (
            450, BAD, "without (at-least-once)", "不对齐（at-least-once）",
            app1 + surplus, app1 + 2 * surplus,
        ),
    )  # fmt: skip
    for left, color, english, chinese, held, end in panels:
        drawing.text(left + 20, 28, english, chinese, color, bold=True)
        for y, task, offset in ((80, "TaskA0", offsets[0]), (170, "TaskA1", offsets[1])):
            drawing.box(left + 20, y - 22, 74, 44)
            drawing.text(left + 57, y - 3, task, anchor="middle", bold=True)
            drawing.text(left + 57, y + 14, str(offset), anchor="middle")
            drawing.line((left + 96, y), (left + 330, y), arrow=True)
        drawing.box(left + 334, 58, 84, 134)
        drawing.text(left + 376, 120, "TaskB1", anchor="middle", bold=True)
        drawing.text(left + 376, 138, "app1", anchor="middle")
        # The barrier of TaskA0 is late; the one of TaskA1 has come, and records behind it.
        drawing.line((left + 130, 64), (left + 130, 96), MARK, 4)
        drawing.text(left + 138, 62, "barrier 100, late", "barrier 100，迟到", MARK)
        drawing.line((left + 318, 154), (left + 318, 186), MARK, 4)
        drawing.text(left + 318, 146, "barrier 100", None, MARK, "end")
        drawing.line((left + 130, 170), (left + 305, 170), color, 9)
        drawing.text(
            left + 110,
            196,
            f"{len(AFTER)} records behind it,",
            f"它后面 {len(AFTER)} 条记录，",
            color,
        )
        drawing.text(
            left + 110,
            214,
            f"{surplus} of them views of app1",
            f"其中 {surplus} 条是 app1 的访问",
            color,
        )
        word = ("held back", "先搁置") if color == GOOD else ("counted", "照样计数")
        drawing.text(left + 345, 214, *word, color, bold=True)
        drawing.lines_in_box(
            left + 20, 235, 400, MARK,
            ("checkpoint 100", "检查点 100"),
            (
                f"partition 0, offset {offsets[0]}; partition 1, offset {offsets[1]}",
                f"分区 0，offset {offsets[0]}；分区 1，offset {offsets[1]}",
            ),
            (f"app0 = {app0}, app1 = {held}", None),
        )  # fmt: skip
        drawing.line((left + 220, 307), (left + 220, 325), color, arrow=True)
        said = ("exact", "精确") if color == GOOD else (f"{surplus} too many", f"多了 {surplus}")
        drawing.lines_in_box(
            left + 20, 327, 400, color,
            (
                f"after the crash {offsets[1]} to {offsets[1] + len(AFTER) - 1} are read again",
                f"崩溃之后重新读 {offsets[1]} 到 {offsets[1] + len(AFTER) - 1}",
            ),
            (f"app0 = {app0}, app1 = {end}: {said[0]}", f"app0 = {app0}，app1 = {end}：{said[1]}"),
        )  # fmt: skip
    return drawing.svg()


# --- E5 ------------------------------------------------------------------------------------------


def e5(is_chinese: bool) -> str:
    from e5_duplicates_in_mysql import (
        CHECKPOINT_EVERY_S,
        COMMIT_EVERY_S,
        CRASH_AFTER_S,
        VIEWS_PER_SECOND,
    )

    checkpoint_s, crash_s = CHECKPOINT_EVERY_S, CHECKPOINT_EVERY_S + CRASH_AFTER_S
    batches, twice = CRASH_AFTER_S // COMMIT_EVERY_S, CRASH_AFTER_S * VIEWS_PER_SECOND
    drawing = Drawing(860, 370, is_chinese)

    def x(seconds: int) -> int:
        return 150 + seconds * 5

    for seconds in (checkpoint_s, 2 * checkpoint_s):
        number = 99 + seconds // checkpoint_s
        drawing.line((x(seconds), 46), (x(seconds), 280), MARK, dashed=True)
        drawing.text(
            x(seconds), 22, f"checkpoint {number}", f"检查点 {number}", MARK, "middle", bold=True
        )
        drawing.text(x(seconds), 39, f"{seconds} s", f"{seconds} 秒", MARK, "middle")
    drawing.line((x(crash_s), 46), (x(crash_s), 110), BAD, dashed=True)
    drawing.line((x(crash_s), 195), (x(crash_s), 240), BAD, dashed=True)
    drawing.text(x(crash_s), 22, "crash", "崩溃", BAD, "middle", bold=True)
    drawing.text(x(crash_s), 39, f"{crash_s} s", f"{crash_s} 秒", BAD, "middle")

    by_itself = range(COMMIT_EVERY_S, crash_s + 1, COMMIT_EVERY_S)
    rows = (
        (90, "a sink of", "自己写的 sink", "one's own", "", by_itself),
        (220, 'format("mysql")', None, "", "", (checkpoint_s, 2 * checkpoint_s)),
    )
    for y, english, chinese, more, more_chinese, commits in rows:
        drawing.text(15, y, english, chinese, bold=True)
        drawing.text(15, y + 18, more, more_chinese, bold=True)
        drawing.line((x(0), y), (x(2 * checkpoint_s) + 20, y), PALE, 3)
        for seconds in commits:
            is_lost = seconds > checkpoint_s and y == 90
            drawing.box(x(seconds) - 4, y - 9, 8, 18, BAD if is_lost else GOOD,
                        BAD if is_lost else GOOD)  # fmt: skip
    # What comes after the restart, below its own line.
    drawing.line((x(crash_s), 105), (x(checkpoint_s) + 6, 125), BAD, arrow=True)
    drawing.line((x(checkpoint_s), 140), (x(2 * checkpoint_s) + 20, 140), PALE, 3)
    for seconds in range(checkpoint_s + COMMIT_EVERY_S, 2 * checkpoint_s + 1, COMMIT_EVERY_S):
        color = BAD if seconds <= crash_s else GOOD
        drawing.box(x(seconds) - 4, 131, 8, 18, color, color)
    drawing.text(
        x(checkpoint_s) - 8,
        145,
        f"read again from {checkpoint_s} s",
        f"从 {checkpoint_s} 秒重新读",
        BAD,
        "end",
    )
    drawing.text(
        x(checkpoint_s) + 8,
        174,
        f"{batches} batches, {twice} rows: there twice",
        f"{batches} 批，{twice} 行：出现两次",
        BAD,
        bold=True,
    )
    drawing.line((x(crash_s), 235), (x(checkpoint_s) + 6, 255), BAD, arrow=True)
    drawing.text(
        x(checkpoint_s) + 8,
        276,
        "nothing to see: no row is there twice",
        "外面什么都看不到：没有一行重复",
        GOOD,
        bold=True,
    )
    drawing.text(
        20, 320, "▮ commit in MySQL, of a checkpoint", "▮ MySQL 的提交，属于某个检查点", GOOD
    )
    drawing.text(
        20,
        345,
        "▮ commit in MySQL, before its checkpoint is complete: undone by no crash",
        "▮ MySQL 的提交，早于它的检查点：崩溃不会撤销它",
        BAD,
    )
    return drawing.svg()


# --- E6 ------------------------------------------------------------------------------------------

ROWS = {1: 80, 2: 200, 3: 320}
SNAPSHOTS = {1: 250, 2: 330, 3: 470}
MONEY_AT = {
    (1, 2): ((100, 200), (290, 480)),
    (1, 3): ((150, 260),),
    (2, 1): ((90, 420),),
    (2, 3): ((130, 540), (400, 660)),
    (3, 1): ((110, 600),),
}
"""Of each payment on a channel, in their order: when it leaves, and when it comes."""
MARKERS_COME = {(1, 2): 330, (1, 3): 470, (2, 3): 600, (2, 1): 480, (3, 1): 680}


def e6(is_chinese: bool) -> str:
    from e6_chandy_lamport import CHANNELS, MONEY, SCRIPTS, run

    parts = run()
    drawing = Drawing(800, 450, is_chinese)
    for name, y in ROWS.items():
        drawing.line((70, y), (740, y), PALE, 3)
        drawing.text(10, y - 8, f"process {name}", f"进程 {name}", bold=True)
        drawing.text(10, y + 12, f"{MONEY[name]}")
    for (source, target), times in MONEY_AT.items():
        paid = [
            step.split()[1]
            for step in SCRIPTS[source]
            if step.startswith("send") and step.endswith(f"to {target}")
        ]
        for amount, (leaves, comes) in zip(paid, times, strict=True):
            is_recorded = int(amount) in parts[target].channels[source]
            color = BAD if is_recorded else INK
            drawing.line((leaves, ROWS[source]), (comes, ROWS[target]), color, arrow=True)
            drawing.text(comes + 4, ROWS[target] + 18, amount, None, color, bold=is_recorded)
    for source, target in CHANNELS:
        comes = MARKERS_COME[source, target]
        start, end = (SNAPSHOTS[source], ROWS[source]), (comes, ROWS[target])
        drawing.line(start, end, MARK, dashed=True, arrow=True)
        is_up = ROWS[target] < ROWS[source]
        drawing.text(
            comes + 6,
            ROWS[target] + (20 if is_up else -8),
            f"M{source}{target}",
            None,
            MARK,
            bold=True,
        )
    for name, x in SNAPSHOTS.items():
        y = ROWS[name]
        drawing.box(x - 6, y - 6, 12, 12, GOOD, GOOD)
        drawing.text(
            x - 8,
            y + (-12 if name == 1 else 24),
            f"S{name} = {parts[name].state}",
            None,
            GOOD,
            "start" if name == 1 else "end",
            bold=True,
        )
    drawing.text(20, 385, "■ state at the first marker", "■ 收到第一个 marker 时的状态", GOOD)
    drawing.text(290, 385, "┄ marker", "┄ marker", MARK)
    drawing.text(420, 385, "→ under way: recorded with the channel", "→ 在途：随通道一起记录", BAD)
    states = [part.state for part in parts.values()]
    under_way = [sum(parts[t].channels[s]) for s, t in CHANNELS]
    said = " + ".join(str(each) for each in [*states, *filter(None, under_way)])
    total = sum(states) + sum(under_way)
    drawing.text(
        20,
        420,
        f"States and channels: {said} = {total}",
        f"状态加通道：{said} = {total}",
        bold=True,
    )
    return drawing.svg()


DRAWINGS: dict[str, Callable[[bool], str]] = {"e3": e3, "e4": e4, "e5": e5, "e6": e6}


def all_drawings() -> dict[str, str]:
    """By the names of their files."""
    return {
        f"{name}.{language}.svg": draw(language == "zh")
        for name, draw in DRAWINGS.items()
        for language in ("en", "zh")
    }


if __name__ == "__main__":
    for file, svg in all_drawings().items():
        (HERE / file).write_text(svg)
