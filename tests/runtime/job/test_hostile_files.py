"""Plans and checkpoints are data: nothing in them is imported, run or unpickled, whatever they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import alpa_lite as al
from alpa_lite.runtime.checkpoint.checksums import LIST, write_checksums
from tests.plan.test_plan import planned
from tests.runtime.checkpoint.saved_states import numbered

LOADER = """
import sys
from pathlib import Path

import alpa_lite as al
from tests.runtime.checkpoint.saved_states import numbered

checkpoints, clean = al.Checkpoints(sys.argv[1]), al.Checkpoints(sys.argv[2])
clean.restore(numbered(0))
clean.plan()
watched = {"import", "exec", "compile", "pickle.find_class", "marshal.loads", "os.system", "subprocess.Popen"}
seen = []
sys.addaudithook(lambda event, args: seen.append((event, str(args[:1]))) if event in watched else None)
step, state = checkpoints.restore(numbered(0))
assert step == 1 and all((state[name] == value).all() for name, value in numbered(1).items())
checkpoints.plan()
print(seen)
"""


def test_names_in_files_are_only_names(tmp_path: Path) -> None:
    """Every name of a module or class in the files of a checkpoint is replaced by that of a trap."""
    trap = tmp_path / "path" / "trap"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text("raise SystemExit('the trap was imported')\nclass Trap:\n    pass\n")
    for folder in ("hostile", "clean"):
        with al.Checkpoints(tmp_path / folder) as checkpoints:
            checkpoints.save(1, numbered(1), plan=planned("mlp", "hybrid").last_plan)
    step = tmp_path / "hostile" / "1"
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {"state": "trap.Trap"}}))
    metadata = json.loads((step / "_METADATA").read_text())
    for entry in metadata["tree_metadata"].values():
        entry["value_metadata"]["value_metadata_class"] = "trap.Trap"
    metadata |= {"custom_metadata": {"__class__": "trap.Trap"}, "value_metadata_tree": '{"py/object": "trap.Trap"}'}
    (step / "_METADATA").write_text(json.dumps(metadata))
    (step / LIST).unlink()
    write_checksums(step)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), str(trap.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path / "hostile"), str(tmp_path / "clean")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
