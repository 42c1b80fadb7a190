"""Factor rules: for each primitive, which dims of its operands and results are split together.

Input: an op. Output: its factor rule (`registry`), and properties of whole graphs that follow from the rules of their
ops (`op_info`, `dims`, `fusion`).
Read `registry` first, then `elementwise` and `contraction`; importing this package registers all rules.
"""

from alpa_lite.rules import contraction, convolution, elementwise, kernels, layout
from alpa_lite.rules.notation import rule_from as rule_from
from alpa_lite.rules.registry import FactorKind as FactorKind
from alpa_lite.rules.registry import Halo as Halo
from alpa_lite.rules.registry import OpView as OpView
from alpa_lite.rules.registry import Rule as Rule
from alpa_lite.rules.registry import RuleBuilder as RuleBuilder
from alpa_lite.rules.registry import has_rule as has_rule
from alpa_lite.rules.registry import known_primitives as known_primitives
from alpa_lite.rules.registry import opaque_rule as opaque_rule
from alpa_lite.rules.registry import register_rule as register_rule
from alpa_lite.rules.registry import rule_of as rule_of
from alpa_lite.rules.registry import rule_source as rule_source
from alpa_lite.rules.registry import view_of as view_of

RULE_MODULES = (contraction, convolution, elementwise, kernels, layout)
"""The modules that register rules; importing them here registers all rules."""
