"""Prints `docs/rules.md`, or with rule ids as arguments what they are about."""

from __future__ import annotations

import sys

from soup_flows.validation.explain import explain, rules_page

if __name__ == "__main__":
    sys.stdout.write("\n".join(explain(rule) for rule in sys.argv[1:]) or rules_page())
