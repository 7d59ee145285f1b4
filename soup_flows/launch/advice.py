"""The tables behind `outcome`: which exception types and words mean which class, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from soup_flows.errors import FailureClass

STOPPED: dict[str, tuple[FailureClass, str]] = {
    "stopped": ("cancelled", "the run was asked to stop"),
    "signal": ("cancelled", "the run was stopped by a signal"),
    "preempted": ("preempted", "the scheduler took the machine back"),
    "holder_gone": ("cancelled", "the flow process ended, so its training was stopped"),
    "timeout": ("timeout", "the run was stopped"),
    "node_lost": ("node_lost", "a machine of the run went away"),
    "unfit": ("bad_config", "the machines of the cluster cannot run together"),
    "host_oom": ("host_oom", "the scheduler ended the run for the memory it took"),
    "supervisor_died": ("rank_killed", "the training was ended because its supervisor died"),
}
"""Reasons of a receipt: class and the sentence that the receipt's detail completes."""

TYPES: tuple[tuple[str, FailureClass], ...] = (
    ("torch.OutOfMemoryError", "cuda_oom"),
    ("torch.cuda.OutOfMemoryError", "cuda_oom"),
    ("builtins.MemoryError", "host_oom"),
    ("huggingface_hub.errors.GatedRepoError", "auth"),
    ("huggingface_hub.errors.RepositoryNotFoundError", "not_found"),
    ("huggingface_hub.errors.RevisionNotFoundError", "not_found"),
    ("huggingface_hub.errors.EntryNotFoundError", "not_found"),
    ("builtins.ImportError", "import_error"),
    ("builtins.FileNotFoundError", "not_found"),
)
"""Exception class (or a base, or a cause of it) and what it means; the first row that fits decides."""

WORDS: tuple[tuple[tuple[str, ...], FailureClass], ...] = (
    (("cuda out of memory",), "cuda_oom"),
    (("cublas_status_alloc_failed",), "cuda_oom"),
    (("no space left on device", "/dev/shm"), "shm_full"),  # noqa: S108
    (("no space left on device", "shared memory"), "shm_full"),
    (("unable to write to file </torch_",), "shm_full"),  # torch, MapAllocator.cpp
    (("insufficient shared memory (shm)",), "shm_full"),  # torch, utils/data/_utils/signal_handling.py
    (("bus error",), "shm_full"),
    (("no space left on device",), "disk_full"),
    (("disk quota exceeded",), "disk_full"),
    (("watchdog caught collective operation timeout",), "nccl_timeout"),  # torch, ProcessGroupNCCL.cpp
    (("timed out waiting", "recv operation"), "nccl_timeout"),  # gloo, unbound_buffer.cc
    (("timed out waiting", "send operation"), "nccl_timeout"),
    (("cannot allocate memory",), "host_oom"),
    (("defaultcpuallocator", "can't allocate memory"), "host_oom"),
    (("401 client error",), "auth"),
    (("403 client error",), "auth"),
    (("gated repo",), "auth"),
    (("invalid username or password",), "auth"),
    (("404 client error",), "not_found"),
    (("is not a valid model identifier",), "not_found"),
    (("modulenotfounderror:",), "import_error"),
    (("importerror:",), "import_error"),
    (("no module named",), "import_error"),
    (
        ("requires", "to be installed"),
        "import_error",
    ),  # transformers, integration_utils.py: a tracker's package
)
"""Words (lower case) that stand together in a line, and what they mean; the first row that fits decides."""

ADVICE: dict[FailureClass, str] = {
    "cuda_oom": "Lower the micro batch, checkpoint activations, or shard more (zero3, full_shard, off-load).",
    "host_oom": "Give the run more host memory, or use less off-loading and fewer data-loader workers.",
    "shm_full": "Enlarge /dev/shm (docker: --shm-size=8g; Kubernetes: an emptyDir with medium Memory).",
    "disk_full": "Free space or keep fewer checkpoints; the last complete checkpoint can be resumed.",
    "nccl_timeout": "Look at the slowest rank's log and stacks; check the interconnect (NCCL_DEBUG=INFO).",
    "stalled": "Read stacks/rank_*.txt: a rank that is not in a collective is the one the others wait for.",
    "rank_killed": "See who ended it: the kernel log (dmesg), the scheduler, or a person. It can be resumed.",
    "node_lost": "Check the host and resume from the last checkpoint.",
    "cluster_silent": "Start the same run again when the cluster answers: it finds the job, or its result.",
    "preempted": "Resume from the last checkpoint.",
    "cancelled": "Nothing is left running. Resume from the last checkpoint if it was not meant.",
    "timeout": "Raise the time limit or resume from the last checkpoint.",
    "auth": "Set HF_TOKEN for an account that was granted access to the model or data set.",
    "not_found": "Check the name of the model, data set, revision or file; a private one needs HF_TOKEN.",
    "bad_config": "Correct the setting that the cause names.",
    "bad_data": "Correct the rows that the cause names.",
    "nan_loss": "Lower the learning rate, use bf16 instead of fp16, and look at the last batch.",
    "import_error": "Install what is missing in the environment that the ranks run in.",
    "code_error": "Read the traceback in errors/rank_*.json.",
    "proof_failed": "The run did not shard as planned and was stopped; see the proof in the report.",
    "unknown": "Read logs/ in the attempt's folder, launcher.log first.",
}


def match_types(types: Sequence[str]) -> FailureClass | None:
    """Return the class for an exception's types (itself, its bases, its causes), or None."""
    return next((kind for name, kind in TYPES if name in types), None)


def match_text(text: str) -> FailureClass | None:
    """Return the class that the words of `text` stand for, or None."""
    lower = text.lower()
    return next((kind for words, kind in WORDS if all(word in lower for word in words)), None)
