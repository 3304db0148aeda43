"""``delta inspect`` in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from delta_cli.reporting.coefficient_statistics import KINDS, TokenCredit, TokenTable
from delta_cli.reporting.colour_scale import DOWN, EVEN, LEVELS, UP, ColourScale, mark, terminal_style
from delta_cli.reporting.inspection import InspectedResponse, Inspection, Variant
from delta_cli.reporting.prefix_tree import PrefixNode
from delta_cli.text import quoted, signed, visible

SIDE_BY_SIDE = 80  # terminal columns needed to show two responses side by side
TOKENS = 400  # shown of a response
RESPONSES = 4  # right ones shown, and as many wrong ones
BRANCH_TOKENS = 24  # shown of a node of the prefix tree
RIGHT, WRONG, QUIET = "bold green", "bold red", "dim"


def render(inspection: Inspection) -> RenderableType:
    """The whole inspection, laid out in the width it is printed in."""
    return Group(
        _head(inspection),
        legend(inspection.scale),
        Text(),
        ResponseColumns(inspection),
        Text("Where the responses branch", style="bold"),
        tree(inspection),
        Text(),
        token_table(inspection.table, inspection.table_of),
    )


def _head(inspection: Inspection) -> Text:
    right = inspection.tree.right
    place = inspection.others.index(inspection.problem) + 1
    head = Text(f"{visible(inspection.run)}  step {inspection.step}  ", style="bold")
    head.append(f"problem {visible(inspection.problem)} ({place} of {len(inspection.others)})\n", style="not bold")
    head.append(f"{visible(inspection.prompt.strip())}\n", style="not bold")
    head.append(
        f"answer {visible(inspection.answer)}; {right} of {len(inspection.responses)} responses right", style="not bold"
    )
    false = inspection.false_mean()
    if false is not None:
        head.append(f"; mean coefficient inside false equations of wrong responses {false:.3f}", style="not bold")
    return head


def legend(scale: ColourScale) -> Text:
    """An explanation of the colours and marks."""
    low, high = scale.ends
    line = Text("coefficient ", style=QUIET).append(f"{low:.2f} damped {DOWN} ", style="not dim")
    for level in range(-LEVELS, LEVELS + 1, 2):
        line.append("  ", style=terminal_style(level))
    line.append(f" {UP} amplified {high:.2f}", style="not dim")
    return line.append("   underlined: part of an equation that does not hold", style=QUIET)


class ResponseColumns:
    """Right responses on the left and wrong ones on the right, or one below the other in a narrow terminal."""

    def __init__(self, inspection: Inspection) -> None:
        self.scale = inspection.scale
        self.right = [variant for variant in inspection.variants if variant[0].response.correct]
        self.wrong = [variant for variant in inspection.variants if not variant[0].response.correct]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if width < SIDE_BY_SIDE or not (self.right and self.wrong):
            for variant in self.right[:RESPONSES] + self.wrong[:RESPONSES]:
                yield card(variant, self.scale, width)
        else:
            half = (width - 2) // 2
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(width=half)
            table.add_column(width=half)
            for pair in zip_longest(self.right[:RESPONSES], self.wrong[:RESPONSES]):
                table.add_row(*(card(variant, self.scale, half) if variant else Text() for variant in pair))
            yield table
        if hidden := sum(max(len(side) - RESPONSES, 0) for side in (self.right, self.wrong)):
            yield Text(f"{hidden} more different responses; --format html shows all\n", style=QUIET)


def card(variant: Variant, scale: ColourScale, width: int) -> RenderableType:
    """A response: outcome and how often it was drawn, coloured tokens with marks below, equations that do not hold."""
    inspected, count = variant
    response = inspected.response
    word, style = ("✓ right", RIGHT) if response.correct else ("✗ wrong", WRONG)
    word += f" ×{count}" if count > 1 else ""
    facts = f"  reward {response.reward:g}{visible(response.each_reward, ' ')}"
    facts += f"  advantage {signed(response.advantage)}  mean {inspected.mean:.3f}"
    lines = [Text(word, style=style).append(facts, style="not bold default")]
    if inspected.turn_means:
        lines[0].append(f"  {inspected.turn_means}", style="not bold default")
    if response.truncated:
        lines[0].append("  cut off", style="not bold default")
    lines += token_lines(inspected, scale, width)
    if len(response) > TOKENS:
        lines.append(Text(f"… {len(response) - TOKENS:,} more tokens; --format html shows all", style=QUIET))
    if calls := [visible(str(call), " ") for turn in inspected.calls for call in turn]:
        lines.append(Text("calls: ").append("  ".join(calls)))
    if false := [visible(equation.text, " ") for equation in inspected.equations if not equation.holds]:
        lines.append(Text("does not hold: ", style=WRONG).append("  ".join(false), style="not bold default"))
    return Group(*lines, Text())


def token_lines(inspected: InspectedResponse, scale: ColourScale, width: int) -> Iterator[Text]:
    """The tokens in lines of ``width`` cells; a line with marks is followed by a line that shows them."""
    line, marks, used = Text(), "", 0
    levels = scale.levels(inspected.response.coefficients[:TOKENS])
    columns = zip(levels, inspected.pieces, inspected.false, inspected.written, strict=False)
    tokens = [
        token
        for level, piece, false, before in columns
        for token in ((0, before, "dim italic"), (level, piece, terminal_style(level) + " underline" * bool(false)))
    ]
    if len(inspected.pieces) <= TOKENS:
        tokens.append((0, inspected.written[-1], "dim italic"))
    for level, piece, style in tokens:
        sign = mark(level)
        for char in visible(piece, "↵\n"):
            cells = cell_len(char)
            if char == "\n" or used + cells > width:
                yield from _with_marks(line, marks)
                line, marks, used = Text(), "", 0
            if char != "\n":
                line.append(char, style=style)
                marks += sign.ljust(cells) if cells else ""
                used, sign = used + cells, " "
    yield from _with_marks(line, marks)


def _with_marks(line: Text, marks: str) -> Iterator[Text]:
    yield line
    if marks.strip():
        yield Text(marks.rstrip(), no_wrap=True)


def tree(inspection: Inspection) -> RenderableType:
    """The prefix tree, with the number of right and wrong responses that run through each node."""
    root = inspection.tree
    if inspection.parting is None:
        return Text("all responses have the same outcome, so there is nothing to compare", style=QUIET)
    drawn = Tree(_label(inspection, root), guide_style=QUIET)
    _grow(inspection, root, drawn)
    return drawn


def _grow(inspection: Inspection, node: PrefixNode, drawn: Tree) -> None:
    for child in node.children:
        _grow(inspection, child, drawn.add(_label(inspection, child)))


def _label(inspection: Inspection, node: PrefixNode) -> Text:
    label = Text()
    if node.stop == 0:
        label.append("(start)", style=QUIET)
    if node.stop > node.start:
        cut = "…" if node.stop - node.start > BRANCH_TOKENS else ""
        coefficient = inspection.coefficient(node)
        level = inspection.scale.level(coefficient)
        label.append(visible(inspection.text(node, BRANCH_TOKENS)) + cut, style="bold")
        label.append(f"  {mark(level).strip() or EVEN}{coefficient:.2f}")
    if node.right:
        label.append(f"  ✓{node.right}", style=RIGHT)
    if node.wrong:
        label.append(f"  ✗{node.wrong}", style=WRONG)
    if node is inspection.parting:
        label.append("  ◆ right and wrong responses first branch here", style="bold")
    elif node.parts:
        label.append("  ◇ branch", style=QUIET)
    return label


def token_table(table: TokenTable, of: str) -> RenderableType:
    """The most amplified and most damped tokens, by kind; without an advantage anywhere, why there are none."""
    if not table.tokens:
        return Text(
            f"No token of {of} has an advantage: the responses to each prompt all got the same reward, so there was "
            "nothing to learn and no credit to give. Choose harder or easier problems.",
            style="bold",
        )
    title = f"Tokens of {of}: {table.tokens:,} with an advantage, in {table.responses:,} responses"
    drawn = Table(box=None, pad_edge=False, padding=(0, 1))
    drawn.add_column()
    for kind in KINDS:
        drawn.add_column(kind, style="not dim")
    for name, part in ((f"{UP} amplified", table.amplified), (f"{DOWN} damped", table.damped)):
        rows = zip_longest(*(part[kind] for kind in KINDS))
        for place, row in enumerate(rows):
            drawn.add_row(name if place == 0 else "", *(_credit(credit) for credit in row))
    return Group(
        Text(title, style="bold"), drawn, Text("token, side (+: A > 0, −: A < 0), mean coefficient, count", style=QUIET)
    )


def _credit(credit: TokenCredit | None) -> Text:
    if credit is None:
        return Text()
    text = Text(quoted(credit.text), style="bold", overflow="ellipsis", no_wrap=True)
    return text.append(f" {credit.side} {credit.mean:.3f} ×{credit.count:,}", style="not bold")
