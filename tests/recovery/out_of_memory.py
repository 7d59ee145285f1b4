"""Installed as `sitecustomize` in the ranks: a GPU that holds four rows at once, on a machine without one."""

import importlib.machinery
import sys

MODULE = "soup_flows.training.trainer"


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name == MODULE else None
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                patch(module.SoupTrainer)

            spec.loader.exec_module = exec_module
        return spec


def patch(trainer):
    import torch

    real = trainer.token_loss

    def token_loss(self, model, inputs):
        if len(inputs["cu_seq_lens"]) - 1 > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, model, inputs)

    trainer.token_loss = token_loss


sys.meta_path.insert(0, Finder)
