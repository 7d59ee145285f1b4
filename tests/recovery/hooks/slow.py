"""Run in each rank before it trains: every step takes a second, so that there is time to ask for something."""

import time

from soup_flows.training.trainer import SoupTrainer

real = SoupTrainer.get_batch_samples


def get_batch_samples(self, *args, **kwargs):
    time.sleep(1)
    return real(self, *args, **kwargs)


SoupTrainer.get_batch_samples = get_batch_samples
