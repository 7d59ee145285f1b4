"""Model folders for tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def changed_model(model: str | Path, folder: Path, **changes: Any) -> Path:
    """Copy a model folder to `folder` with changes to its `config.json`."""
    shutil.copytree(model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder
