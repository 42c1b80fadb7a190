"""The colours of pages and figures: of stages, which follow each other, and of what a stage does.

Each is a pair, on light and on dark paper; white text is readable on all of them. Neighbouring stages differ in hue and
in lightness, so that they can be told apart without seeing every hue, and on paper without colours.
"""

from __future__ import annotations

STAGES = (
    ("#2f6fc4", "#4a86d8"),
    ("#b35c00", "#c9731a"),
    ("#1f7f5c", "#2f9a73"),
    ("#8a4fb8", "#9f6bcb"),
    ("#a8324a", "#c44f66"),
    ("#4a6572", "#67848f"),
    ("#7a6a00", "#8f7f1a"),
    ("#0f7c8c", "#2492a3"),
    ("#a0458f", "#b862a8"),
    ("#5a57b8", "#7774d0"),
)
"""Of the stages in turn; more stages begin again."""

KINDS = {
    "forward": ("#2f6fc4", "#4a86d8"),
    "backward": ("#1f7f5c", "#2f9a73"),
    "weight": ("#7cb8a3", "#1d6b51"),
    "update": ("#b35c00", "#c9731a"),
    "receive": ("#8c96a3", "#6b7785"),
    "other": ("#b8bec6", "#4a525c"),
}
"""Of what devices do; `weight`: the gradients of weights where they are a task of their own."""


def stage_class(stage: int) -> str:
    """The CSS class of a stage, `stage-3`."""
    return f"stage-{stage % len(STAGES)}"


def stage_colour(stage: int) -> str:
    """The colour of a stage on light paper."""
    return STAGES[stage % len(STAGES)][0]


def colour_rules() -> str:
    """The CSS variables and classes; a drawing fills with `var(--c)`."""
    kinds = "".join(f"  --{kind}: light-dark({light}, {dark});\n" for kind, (light, dark) in KINDS.items())
    stages = "\n".join(
        f".alpa-lite .stage-{number} {{ --c: light-dark({light}, {dark}); }}"
        for number, (light, dark) in enumerate(STAGES)
    )
    fills = "\n".join(f".alpa-lite .{kind} {{ fill: var(--{kind}); }}" for kind in KINDS)
    return f".alpa-lite {{\n{kinds}}}\n{stages}\n{fills}\n"
