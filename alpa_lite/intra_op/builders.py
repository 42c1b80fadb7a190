"""The builders of stages on one mesh, of which the last few are kept: a stage is often solved quickly and then well."""

from __future__ import annotations

from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.interning import Recent
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.strategy_catalogue import Catalogue

_NUM_BUILDERS = 4


class Builders:
    """Makes them from one catalogue, which they share."""

    def __init__(self, catalogue: Catalogue) -> None:
        """Start without any."""
        self.catalogue = catalogue
        self._recent: Recent[StageView, Builder] = Recent(_NUM_BUILDERS)

    def of(self, view: StageView) -> Builder:
        """The builder of a stage."""
        return self._recent(view, lambda: Builder(view, self.catalogue))
