"""Prints `docs/migration.md`."""

import sys

from soup_flows.migrate.page import migration_page

if __name__ == "__main__":
    sys.stdout.write(migration_page())
