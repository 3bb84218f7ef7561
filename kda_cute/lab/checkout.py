"""What only a checkout of the repository has: its `perf` package is not part of an installed one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def perf(module: str) -> ModuleType:
    """The module perf.`module` of the checkout that this package runs from; FileNotFoundError when it
    runs from anywhere else.
    """
    if not (ROOT / "perf" / "__init__.py").exists():
        raise FileNotFoundError(
            f"no perf/ beside {ROOT / 'kda_cute'}: measuring needs a checkout of the repository, "
            "installed with pip install -e"
        )
    if str(ROOT) not in sys.path:  # a console script has its own folder there instead
        sys.path.insert(0, str(ROOT))  # before other packages of that name
    return importlib.import_module(f"perf.{module}")
