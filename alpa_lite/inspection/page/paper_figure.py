"""A figure for print: text stays text in PDF, PostScript and SVG, and a notebook draws the figure by itself.

Imported where a figure is made, since matplotlib is an optional extra.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

#: Journals refuse Type 3 fonts, which matplotlib embeds by default; with Type 42, text can be edited and searched.
_FONTS: Mapping[str, Any] = MappingProxyType({"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"})


class PaperFigure(Figure):
    """A matplotlib figure without pyplot, which would choose a backend and keep the figure alive."""

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save the figure with fonts of Type 42; the arguments are those of matplotlib."""
        # The fonts are a setting of the moment at which a file is written, not of the figure.
        with rc_context(dict(_FONTS)):
            super().savefig(fname, **options)

    def _repr_svg_(self) -> str:
        """Draw the figure in a notebook, whatever its backend."""
        text = io.StringIO()
        # With letters as paths: the notebook may have other fonts.
        super().savefig(text, format="svg")
        return text.getvalue()
