"""For every rule about a DeepSpeed JSON: changes to the good file that it must catch, and the nearest it must not.

`run` holds the arguments of `world.run` (None: the file is checked alone).
"""

from __future__ import annotations

from typing import Any

from tests.validation.world import machine

Z = "zero_optimization"
STAGE2 = {f"{Z}.stage": 2, f"{Z}.overlap_comm": None}
FIXED = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
NODES = {"plan": {"nodes": 2, "world_size": 4}, "on": machine("A100", 2)}
FP16 = {"spec": {"training": {"dtype": "fp16"}}}
MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}

# rule -> (caught, let through, run of both or None)
JSON_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "DS019": ({"comms_config": {"verbose": False}}, {"comms_logger": {"verbose": False}}, None),
    "DS020": ({"gradient_cliping": 1.0}, {"gradient_clipping": 1.0}, None),
    "DS021": ({f"{Z}.offload_optimizer": {"device": "cpu", "pin_memroy": True}},
              {f"{Z}.offload_optimizer": {"device": "cpu", "pin_memory": True}}, None),
    "DS022": ({"aio": {"thread_count": 1}}, {"aio": {"intra_op_parallelism": 1}}, None),
    "DS023": ({"amp": {"enabled": False}}, {"torch_autocast": {"enabled": False}}, None),
    "DS024": ({f"{Z}.cpu_offload": True}, {f"{Z}.offload_optimizer": {"device": "cpu"}}, None),
    "DS025": ({f"{Z}.cpu_offload": True, f"{Z}.offload_optimizer": {"device": "cpu"}},
              {f"{Z}.cpu_offload": True}, None),
    "DS026": ({f"{Z}.reduce_bucket_size": "5e8"}, {f"{Z}.reduce_bucket_size": 5e8}, None),
    "DS027": ({f"{Z}.sub_group_size": "auto"}, {f"{Z}.stage3_prefetch_bucket_size": "auto"}, None),
    "DS028": ({f"{Z}.offload_param": {"device": "gpu"}}, {f"{Z}.offload_param": {"device": "cpu"}}, None),
    "DS029": ({Z: True}, {f"{Z}.stage": 1}, None),
    "DS030": ({**FIXED, "train_batch_size": 18}, FIXED, None),
    "DS031": ({"train_batch_size": None, "train_micro_batch_size_per_gpu": None}, {"train_batch_size": None}, None),
    "DS032": ({"gradient_accumulation_steps": None}, {}, {"spec": {"training": {"global_batch_size": 64}}}),
    "DS033": ({"gradient_accumulation_steps": None, "train_batch_size": None}, {"train_batch_size": None},
              {"spec": {"training": {"global_batch_size": 64}}}),
    "DS034": ({**FIXED, "train_batch_size": None}, FIXED, None),
    "DS040": ({"bf16": {"enabled": False}}, {"bf16": {"enabled": True}}, {}),
    "DS041": ({"bf16.enabled": True, "fp16.enabled": True}, {"bf16.enabled": True, "fp16.enabled": False}, None),
    "DS042": ({"gradient_clipping": 0.5}, {"gradient_clipping": 1}, {}),
    "DS043": ({"gradient_clipping": None}, {"gradient_clipping": "auto"},
              {"spec": {"training": {"max_grad_norm": 0.5}}}),
    "DS044": ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
              {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}}, {}),
    "DS045": ({"optimizer": {"type": "AdamW"}}, {}, None),
    "DS046": ({"scheduler": {"type": "WarmupDecayLR"}}, {"scheduler": {"type": "WarmupLR"}},
              {"spec": {"training": {"lr_scheduler_type": "constant_with_warmup"}}}),
    "DS047": ({"scheduler": {"type": "WarmupDecayLR"}}, {}, None),
    "DS048": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
              {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, None),
    "DS049": ({"data_types": None}, {}, {"spec": {"training": {"global_batch_size": 64}}}),
    "DS050": ({"optimizer": {"type": "OneBitAdam"}}, {"optimizer": {"type": "adamw"}}, None),
    "DS051": (MOMENTUM, {**MOMENTUM, "zero_allow_untested_optimizer": True}, None),
    "DS052": ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
              {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.0}}}, None),
    "DS053": ({"gradient_clipping": -1.0}, {"gradient_clipping": 0}, None),
    "DS054": ({"optimizer": {"type": "AdamW", "params": {"weight_deacy": 0.1}}},
              {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}, None),
    "DS055": ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}},
              {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}, None),
    "DS060": ({**STAGE2, f"{Z}.offload_param": {"device": "cpu"}},
              {**STAGE2, f"{Z}.offload_param": {"device": "none"}}, None),
    "DS061": ({**STAGE2, f"{Z}.offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
              {f"{Z}.offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, None),
    "DS062": ({f"{Z}.offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
              {f"{Z}.offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, None),
    "DS063": ({f"{Z}.stage": 2}, {f"{Z}.stage": 3}, None),
    "DS064": ({f"{Z}.zero_hpz_partition_size": 3}, {f"{Z}.zero_hpz_partition_size": 2}, NODES),
    "DS065": ({f"{Z}.zero_hpz_partition_size": 4}, {f"{Z}.zero_hpz_partition_size": 2}, NODES),
    "DS066": ({**STAGE2, f"{Z}.zero_hpz_partition_size": 2}, {f"{Z}.zero_hpz_partition_size": 2}, None),
    "DS067": ({f"{Z}.zero_quantized_weights": True}, {f"{Z}.zero_quantized_weights": False}, {}),
    "DS068": ({f"{Z}.zero_quantized_gradients": True}, {f"{Z}.zero_quantized_gradients": False}, FP16),
    "DS069": ({f"{Z}.zero_quantized_gradients": True, "bf16.enabled": True},
              {f"{Z}.zero_quantized_gradients": True, "fp16.enabled": True}, None),
    "DS070": ({f"{Z}.zero_quantized_nontrainable_weights": True, "bf16.enabled": True},
              {f"{Z}.zero_quantized_nontrainable_weights": True, "fp16.enabled": True}, None),
    "DS071": ({f"{Z}.stage3_gather_16bit_weights_on_model_save": None},
              {f"{Z}.stage3_gather_16bit_weights_on_model_save": None,
               f"{Z}.gather_16bit_weights_on_model_save": True}, {}),
    "DS072": ({f"{Z}.compute_grad_norm": False},
              {**STAGE2, f"{Z}.compute_grad_norm": False, "gradient_clipping": 0}, None),
    "DS073": ({**STAGE2, f"{Z}.offload_optimizer": {"device": "cpu", "ratio": 0.5}},
              {f"{Z}.offload_optimizer": {"device": "cpu", "ratio": 0.5}}, None),
    "DS074": ({"checkpoint": {"load_universal": True}}, {"checkpoint": {"load_universal": False}}, None),
    "DS075": ({f"{Z}.sub_group_size": 0}, {f"{Z}.sub_group_size": 1e9}, None),
    "DS080": ({"activation_checkpointing": {"cpu_checkpointing": True}},
              {"activation_checkpointing": {"cpu_checkpointing": False}}, None),
    "DS081": ({"tensorboard": {"enabled": True}}, {"tensorboard": {"enabled": False}}, None),
    "DS082": ({"wall_clock_breakdown": True}, {"wall_clock_breakdown": False}, None),
    "DS083": ({"tensor_parallel": {"autotp_size": 2}}, {"tensor_parallel": {"autotp_size": 1}}, None),
    "DS084": ({"dataloader_drop_last": True}, {"dataloader_drop_last": False}, None),
    "DS085": ({"gradient_allreduce_op": "sum"}, {"gradient_allreduce_op": "mean"}, None),
    "SE003": ({"comet": {"api_key": "abc"}}, {"comet": {"project": "abc"}}, None),
}  # fmt: skip

GOOD_FSDP: dict[str, Any] = {
    "version": 2,
    "reshard_after_forward": True,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "cpu_offload": False,
    "cpu_ram_efficient_loading": True,
    "state_dict_type": "FULL_STATE_DICT",
}

FSDP_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FS001": ({"offload_params": True}, {"fsdp_cpu_offload": True}),
    "FS002": ({"backward_prefetch": "BACKWARD_PRE"}, {}),
    "FS003": ({"version": 1}, {"version": 2}),
    "FS004": ({"cpu_offload": "false"}, {"cpu_offload": False}),
    "FS005": ({"auto_wrap_policy": "transformer_based_wrap"}, {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
    "FS006": ({"auto_wrap_policy": "NO_WRAP"}, {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
    "FS007": ({"state_dict_type": "LOCAL_STATE_DICT"}, {"state_dict_type": "full_state_dict"}),
    "FS008": ({"activation_checkpointing": True}, {"activation_checkpointing": False}),
    "FS009": ({"min_num_params": 1000}, {"min_num_params": 0}),
    "FS010": ({"xla": True}, {"xla": False}),
    "FS011": ({"state_dict_type": "SHARDED_STATE_DICT"}, {"state_dict_type": "FULL_STATE_DICT"}),
}
