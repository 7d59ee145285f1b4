"""Block types: what can be kept in Prefect, edited in its page and named in a deployment.

`prefect block register -m soup_flows.blocks` registers them; servers and workers find them by the entry point
`prefect.collections`.
"""

from __future__ import annotations

from typing import Any

from prefect.blocks.core import Block
from pydantic import Field

from soup_flows.report import TrainReport
from soup_flows.spec import TrainingSpec


class SoupTrainingJob(Block):
    """A fine-tuning job, kept as a whole: model, data, preset and every setting.

    Example:
        Load a stored job and run it:
        ```python
        from soup_flows.blocks import SoupTrainingJob

        report = SoupTrainingJob.load("BLOCK_NAME").run()
        ```
    """

    _block_type_name = "Soup Training Job"
    _block_type_slug = "soup-training-job"
    _description = "A fine-tuning job for the flow soup-train: model, data set, preset and every setting."

    # Blocks keep unknown keys silently; the spec inside refuses them.
    spec: TrainingSpec = Field(default=..., title="Job", description="What to train, on what, and how.")

    def parameters(self) -> dict[str, Any]:
        """Return the job as parameters of the flow `soup-train`."""
        return {name: getattr(self.spec, name) for name in TrainingSpec.model_fields}

    def run(self) -> TrainReport:
        """Run the flow `soup-train` with this job, in this process.

        Raises:
            Refused: nothing was started; all problems, each with its fix.
            TrainingFailed: a started run ended badly; class, cause, advice.
        """
        from soup_flows.flows import soup_train

        report: TrainReport = soup_train(**self.parameters())
        return report
