"""Parameter counts from a config equal those of the real class on the meta device, to the parameter."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from soup_flows.architecture import from_config, from_folder, known_families
from soup_flows.architecture.files import from_shapes
from soup_flows.errors import Refused

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "pad_token_id": 0,
}
MOE = {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
MLA = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
CASES = {
    "llama": ("llama", SMALL),
    "llama tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "llama biases": ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {**SMALL, "head_dim": 32}),
    "mistral": ("mistral", SMALL),
    "ministral": ("ministral", {**SMALL, "head_dim": 16}),
    "qwen2": ("qwen2", SMALL),
    "qwen2 tied": ("qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", SMALL),
    "gemma": ("gemma", SMALL),
    "gemma2": ("gemma2", SMALL),
    "gemma3": ("gemma3_text", SMALL),
    "phi": ("phi", SMALL),
    "phi qk norm": ("phi", {**SMALL, "qk_layernorm": True}),
    "phi3": ("phi3", SMALL),
    "gpt_neox": ("gpt_neox", SMALL),
    "gpt_neox no bias": ("gpt_neox", {**SMALL, "attention_bias": False}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 320, "n_positions": 50}),
    "opt": ("opt", {**SMALL, "ffn_dim": 160, "max_position_embeddings": 40, "word_embed_proj_dim": 64}),
    "opt post-norm": (
        "opt",
        {**SMALL, "ffn_dim": 160, "word_embed_proj_dim": 64, "do_layer_norm_before": False},
    ),
    "unwritten opt": ("opt", {**SMALL, "ffn_dim": 160, "word_embed_proj_dim": 32}),
    "olmo": ("olmo", SMALL),
    "olmo2": ("olmo2", SMALL),
    "olmo3": ("olmo3", SMALL),
    "smollm3": ("smollm3", SMALL),
    "granite": ("granite", SMALL),
    "starcoder2": ("starcoder2", SMALL),
    "mixtral": ("mixtral", {**SMALL, "num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**SMALL, **MOE, "shared_expert_intermediate_size": 40}),
    "qwen2_moe mixed": ("qwen2_moe", {**SMALL, **MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**SMALL, **MOE, "head_dim": 16, "mlp_only_layers": [0]}),
    "deepseek_v2": ("deepseek_v2", {**SMALL, **MLA, "q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek_v2 low rank": ("deepseek_v2", {**SMALL, **MLA, "q_lora_rank": 20, "n_shared_experts": 1}),
    "deepseek_v3": ("deepseek_v3", {**SMALL, **MLA, "q_lora_rank": 20, "n_group": 2, "topk_group": 1}),
    "unknown stablelm": ("stablelm", SMALL),
    "unknown cohere": ("cohere", SMALL),
}


@pytest.fixture(scope="module")
def real() -> dict:
    child = Path(__file__).with_name("count_real_models.py")
    done = subprocess.run(
        [sys.executable, child], input=json.dumps(CASES), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_known_family_has_a_case() -> None:
    assert {kind for kind, _ in CASES.values()} >= set(known_families())


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("un", "phi qk"))])
def test_count_equals_the_real_class(name: str, real: dict) -> None:
    found = from_config(real[name]["config"], count_unknown=False)
    assert found.known
    assert found.source == "config"
    assert found.parameters == real[name]["parameters"]
    assert found.lora_parameters(1) == real[name]["lora_per_rank"]


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_shapes_give_the_same_count_for_any_family(name: str, real: dict) -> None:
    shapes = {n: tuple(s) for n, s in real[name]["shapes"].items()}
    found = from_shapes(real[name]["config"], shapes, "files")
    assert not found.known
    assert found.parameters == real[name]["parameters"]
    assert found.num_layers == 3


@pytest.mark.ranks
def test_an_unknown_family_is_counted_in_a_child_and_says_so(real: dict) -> None:
    found = from_config(real["unknown cohere"]["config"])
    assert found.source == "meta"
    assert found.notes
    assert found.parameters == real["unknown cohere"]["parameters"]
    variant = from_config(real["phi qk norm"]["config"])
    assert variant.parameters == real["phi qk norm"]["parameters"]


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {
                "model_type": "llama",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
            },
            8030261248,
        ),
        (
            {
                "model_type": "qwen2",
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
            },
            7615616512,
        ),
        (
            {
                "model_type": "mixtral",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 32000,
                "num_local_experts": 8,
            },
            46702792704,
        ),
    ],
)
def test_published_counts(config: dict, parameters: int) -> None:
    assert from_config(config).parameters == parameters


def test_a_torch_free_parent() -> None:
    code = "import sys, soup_flows.memory; print(*(m in sys.modules for m in ('torch', 'numpy')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_folder_is_checked_against_its_weights(tmp_path: Path) -> None:
    config = {"model_type": "llama", **SMALL, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = from_folder(tmp_path)
    assert whole.notes == ()
    table = {"x": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}}
    head = json.dumps(table).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(24))
    found = from_folder(tmp_path)
    assert "12 elements" in found.notes[0]
    assert found.parameters == whole.parameters
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    assert "could not be read" in from_folder(tmp_path).notes[0]


def test_files_of_an_unknown_family_are_enough(tmp_path: Path) -> None:
    config = {"model_type": "brand_new", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed.weight": [16, 8], "model.norm.weight": [8]}
    for i in range(2):
        shapes |= {f"model.layers.{i}.mlp.up.weight": [32, 8], f"model.layers.{i}.mlp.up.bias": [32]}
    head = json.dumps(
        {n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    found = from_folder(tmp_path)
    assert (found.source, found.known, found.tied) == ("files", False, True)
    assert found.parameters == 16 * 8 + 8 + 2 * (32 * 8 + 32)


def test_towers_with_the_same_layer_names_are_told_apart() -> None:
    config = {"model_type": "two_towers", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    shapes = {"text.embed.weight": (16, 8)}
    for tower, width in (("text", 8), ("vision", 6)):
        shapes |= {f"{tower}.layers.{i}.q_proj.weight": (width, width) for i in range(3)}
    found = from_shapes(config, shapes, "files")
    assert found.parameters == 16 * 8 + 3 * (64 + 36)
    assert [layer.count for layer in found.layers] == [3, 3]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "model_type ''"),
        ({"model_type": "brand_new"}, "brand_new"),
        ({"model_type": "llama", "hidden_size": 64}, "num_attention_heads"),
        ({"model_type": "llama", **SMALL, "hidden_size": None}, "llama"),
    ],
)
def test_bad_configs_are_refused_in_words(config: dict, words: str) -> None:
    with pytest.raises(Refused, match=words):
        from_config(config, count_unknown=False)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json"):
        from_folder(tmp_path / "none")


def test_lora_targets() -> None:
    model = from_config({"model_type": "llama", **SMALL})
    assert model.lora_parameters(2, ["q_proj"]) == 3 * 2 * (64 + 64)
    assert model.lora_parameters(2, ["lm_head"]) == 2 * (64 + 320)
    with pytest.raises(ValueError, match="q_prj"):
        model.lora_parameters(2, ["q_prj"])
