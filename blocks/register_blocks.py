"""Check the documents beside this file and keep them as blocks: `python blocks/register_blocks.py [--check]`.

`soup_flows.deploy.documents` says how a document is named, and `soup-flows deploy --blocks DIR` does the same for a
folder of your own, without a clone. All files are checked before the first is saved; `--check` only checks.
A Prefect server must be reachable to save.
"""

import sys
from pathlib import Path

from soup_flows.deploy.documents import read_documents
from soup_flows.errors import Refused


def main(argv: list[str]) -> int:
    """Check, then save; returns 2 when a document is wrong."""
    try:
        found = read_documents(Path(__file__).parent)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    for (_, name), block in found.items():
        if "--check" not in argv:
            block.save(name, overwrite=True)
        print(f"{'checked' if '--check' in argv else 'saved'} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
