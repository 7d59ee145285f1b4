"""`python -m soup_flows.data`; see `soup_flows.data.command`."""

from soup_flows.data.command import main

raise SystemExit(main())
