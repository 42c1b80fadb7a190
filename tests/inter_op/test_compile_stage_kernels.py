import subprocess
import sys


def test_kernels_compile_ahead():
    """In a process of its own, where nothing else has compiled them; one run serves tables of any size."""
    program = """
import numpy as np
from alpa_lite.inter_op import compile_stage_kernels as kernels, stage_kernels
from benchmarks.search import random_table
kernels.compile_kernels()
called = (stage_kernels.cheapest_of, stage_kernels.fill, stage_kernels.trace)
table = random_table(4, num_configurations=2)
kernels.solve(table, num_devices=8, num_microbatches=2, max_stages=2)
print([(each.__name__, len(each.signatures)) for each in called])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('cheapest_of', 1), ('fill', 1), ('trace', 1)]"
