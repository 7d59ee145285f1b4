"""Start, watch, stop and explain one attempt of a training run.

Reading order: `plan` (the launch as data), `run` (the flow's side), `supervisor` (the process in between,
standard library only), `rank` (what each rank does first), `ship` and `events` (passing on what ranks wrote),
`outcome` (why it ended). Nothing is imported here, so that the supervisor starts with the standard library
alone.
"""
