from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import recipe.dag.report

MODULES = sorted(path.stem for path in Path(recipe.dag.report.__file__).parent.glob("[a-z]*.py"))


def test_reports_need_neither_torch_nor_verl_nor_ray():
    imports = "; ".join(f"import recipe.dag.report.{module}" for module in MODULES)
    code = f"import sys; {imports}; print(sorted({{'torch', 'verl', 'ray'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
