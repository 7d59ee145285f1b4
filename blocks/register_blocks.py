"""Check the documents beside this file and keep them as blocks: `python blocks/register_blocks.py [--check]`.

`NAME.yaml` is a job (`SoupTrainingJob`); `NAME.TYPE.yaml` is a block of another type: `placement`,
`checkpoint-store`, `experiment-tracker`. Secrets do not belong into files: give them in Prefect's page.
All files are checked before the first is saved; `--check` only checks. A Prefect server must be reachable to save.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from prefect.blocks.core import Block

from soup_flows.blocks import SoupTrainingJob
from soup_flows.deploy import block_types
from soup_flows.spec import parse_spec

TYPES = {kind.get_block_type_slug().removeprefix("soup-"): kind for kind in block_types()}


def read(file: Path) -> Block:
    """Return the block of a document.

    Raises:
        ValueError: with what is wrong.
    """
    kind = file.stem.partition(".")[2]
    values: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not kind:
        return SoupTrainingJob(spec=parse_spec(values))
    if kind not in TYPES:
        raise ValueError(f"there is no type {kind!r}; there are {', '.join(TYPES)}")
    fields = TYPES[kind].model_fields
    secrets = {field for field, value in fields.items() if "Secret" in str(value.annotation)}
    unknown, secret = values.keys() - fields.keys(), values.keys() & secrets
    if unknown or secret:
        raise ValueError(
            f"not a field: {sorted(unknown)}; secret, give it in Prefect's page: {sorted(secret)}"
        )
    return TYPES[kind](**values)


def main(argv: list[str]) -> int:
    """Check, then save; returns 2 when a document is wrong."""
    blocks, wrong = {}, False
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        try:
            blocks[file.stem.partition(".")[0]] = read(file)
        except ValueError as error:
            print(f"{file.name}: {error}", file=sys.stderr)
            wrong = True
    if wrong:
        return 2
    for name, block in blocks.items():
        if "--check" not in argv:
            block.save(name, overwrite=True)
        print(f"{'checked' if '--check' in argv else 'saved'} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
