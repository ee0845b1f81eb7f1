"""Checking a recipe imports no torch and runs no code that the recipe names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLANTED = """\
[model]
checkpoint = "stabilityai/stable-diffusion-3.5-medium"
famly = "sd3"

[train]
num_rollout = "four"
forward_dtype = "fp8"

[optimizer]
lr = -1e-4

[rollout]
batch_size = 4
n_samples_per_prompt = 4

[sde]
type = "ode"
step_strategy = "sde_windw"
num_steps = 2

[data]
prompt_data = "gone.jsonl"

[reward]
type = "canary.reward:Reward"

[algorithm]
clip_range = 1e-3

[fault_tolerance]
enabled = false
"""
WRONG = [
    "model.famly",
    "train.num_rollout",
    "train.forward_dtype",
    "optimizer.lr",
    "sde.type",
    "sde.step_strategy",
    "data.prompt_data",
    "reward.type",
    "algorithm.clip_range",
    "fault_tolerance.enabled",
]
HEAVY = ["torch", "diffusers", "transformers", "peft", "numpy", "rapidocr", "rich"]
PROGRAM = """\
import sys
for name in {heavy!r}:
    sys.modules[name] = None
from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import RecipeError
try:
    load_recipe(sys.argv[1], catalog=Catalog.load())
except RecipeError as error:
    print(error.exit_code)
    print(*[problem.path for problem in error.problems], sep="\\n")
    assert "canary" not in sys.modules
"""


def test_ten_planted_mistakes_are_all_reported_without_torch(tmp_path: Path) -> None:
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "__init__.py").write_text("raise SystemExit('code of a recipe ran')")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(PLANTED)
    program = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), str(recipe)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code, *paths = done.stdout.split()
    assert code == "2"
    assert paths == WRONG


def test_importing_the_package_imports_no_pydantic() -> None:
    program = "import sys; sys.modules['pydantic'] = None; import drl.config, drl.config.flags"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
