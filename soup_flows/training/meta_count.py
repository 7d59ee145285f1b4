"""Child process that counts a model of any family on the meta device.

`python -m soup_flows.training.meta_count` reads a config as JSON on stdin and prints `{name: shape}` of
every parameter as JSON. Only this child imports torch and transformers; nothing is allocated or downloaded,
and remote code is never run.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout


def main() -> None:
    """Build the model on the meta device and print its parameter shapes, shared parameters once."""
    config = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        known = AutoConfig.for_model(config.pop("model_type"), **config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(known, trust_remote_code=False)
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    json.dump(shapes, sys.stdout)


if __name__ == "__main__":
    main()
