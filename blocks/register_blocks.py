"""Check the job documents beside this file and keep them as blocks: `python blocks/register_blocks.py [--check]`.

Every YAML file becomes a `SoupTrainingJob` with the file's name. All files are checked before the first is saved;
`--check` only checks. A Prefect server must be reachable to save.
"""

import sys
from pathlib import Path

import yaml

from soup_flows.blocks import SoupTrainingJob
from soup_flows.errors import Refused
from soup_flows.spec import parse_spec


def main(argv: list[str]) -> int:
    """Check, then save; returns 2 when a document is wrong."""
    jobs, wrong = {}, False
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        try:
            jobs[file.stem] = SoupTrainingJob(
                spec=parse_spec(yaml.safe_load(file.read_text(encoding="utf-8")))
            )
        except Refused as refused:
            print(f"{file.name}: {refused}", file=sys.stderr)
            wrong = True
    if wrong:
        return 2
    for name, job in jobs.items():
        if "--check" not in argv:
            job.save(name, overwrite=True)
        print(f"{'checked' if '--check' in argv else 'saved'} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
