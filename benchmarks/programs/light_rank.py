"""A rank that only pretends to train: `light_rank.py STEPS SECONDS LINES`; it beats, writes events and prints."""

import sys
import time

from soup_flows.launch import rank

rank.attach()
steps, seconds, lines = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
events = rank.EventWriter(rank.attempt_dir() / "events.jsonl", rank.rank_number())
events.write("started")
for step in range(1, steps + 1):
    time.sleep(seconds)
    for number in range(lines // steps):
        print("line", number, "x" * 80)
    rank.heartbeat(step)
    events.write("step", step=step, seconds=seconds)
events.write("left")
