"""Run in each rank before it trains: the rows of step 5 give no finite loss at the full learning rate."""

from soup_flows.training.trainer import SoupTrainer

real = SoupTrainer.token_loss
STEP = 5


def token_loss(self, model, inputs):
    loss, tokens = real(self, model, inputs)
    full_rate = self.checkpointer.orders.learning_rate_scale == 1
    if model.training and self.state.global_step + 1 == STEP and tokens and full_rate:
        loss = loss * float("nan")
    return loss, tokens


SoupTrainer.token_loss = token_loss
