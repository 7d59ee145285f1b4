"""A wrong spec is explained: where, what, the nearest valid value, all problems at once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from soup_flows.errors import Problem, Refused, TrainingFailed
from soup_flows.other_words import OTHER_WORDS
from soup_flows.spec import TrainingSpec, parse_spec


def refused(**values: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        parse_spec({"model": "m", "dataset": "d", **values})
    return caught.value


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"deepspeed": "zero9"}, "deepspeed", "did you mean 'zero3'"),
        ({"fsdp": "ful_shard"}, "fsdp", "did you mean 'full_shard'"),
        ({"gpus": 0}, "gpus", ">= 1"),
        ({"gpus": -1}, "gpus", ">= 1"),
        ({"gpus": "many"}, "gpus", "auto"),
        ({"gpus": 2.5}, "gpus", "whole number"),
        ({"gpus": True}, "gpus", "whole number"),
        ({"deepspeed": "zero2", "fsdp": "full_shard"}, "deepspeed", "exclude each other"),
        ({"deepspeed": "zero2", "deepspeed_config": "x.json"}, "deepspeed", "exclude each other"),
        ({"fsdp": "full_shard", "strategy": "ddp"}, "fsdp", "exclude each other"),
        ({"training": {"learning_rate": -1}}, "training.learning_rate", "> 0"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate", "a number"),
        ({"training": {"lerning_rate": 1}}, "training.lerning_rate", "did you mean 'learning_rate'"),
        ({"traning": {}}, "traning", "did you mean 'training'"),
        ({"training": 3}, "training", "a group of settings"),
        ({"model": ""}, "model", "text"),
        ({"data": {"max_length": 1}}, "data.max_length", ">= 8"),
        ({"launcher": {"stop_budget_s": 60}}, "launcher.stop_budget_s", "<= 28"),
        ({"launcher": {"timeout_min": float("inf")}}, "launcher.timeout_min", "a number > 0"),
        ({"training": {"num_train_epochs": 1e308}}, "training.num_train_epochs", "<= 10000"),
        ({"training": {"max_steps": 10**30}}, "training.max_steps", "<= 1000000000"),
        ({"training": {"global_batch_size": 10**22}}, "training.global_batch_size", "<= 10000000"),
        ({"training": {"global_batch_size": True}}, "training.global_batch_size", "whole number"),
        ({"training": {"learning_rate": True}}, "training.learning_rate", "a number"),
        ({"model": ""}, "model", "text that is not empty"),
        ({"strategy": "zero3"}, "strategy", "did you mean deepspeed=zero3?"),
        ({"deepspeed": "full_shard"}, "deepspeed", "did you mean fsdp=full_shard?"),
        ({"fsdp": "ddp"}, "fsdp", "did you mean strategy=ddp?"),
        ({"\x1b[31mmodel": 1}, "\\x1b[31mmodel", "is not a setting"),
    ],
)
def test_one_clear_problem(values: dict[str, Any], field: str, words: str) -> None:
    error = refused(**values)
    assert [problem.field for problem in error.problems] == [field]
    assert words in str(error)


def test_all_problems_at_once() -> None:
    error = refused(gpus="many", deepspeed="zero9", training={"seed": -1, "dtype": "bf8"})
    assert {p.field for p in error.problems} == {"gpus", "deepspeed", "training.seed", "training.dtype"}


def test_missing_fields_are_named() -> None:
    with pytest.raises(Refused) as caught:
        parse_spec({})
    assert [(p.field, p.id) for p in caught.value.problems] == [("model", "SPEC003"), ("dataset", "SPEC003")]


def test_text_numbers_are_taken_for_gpus() -> None:
    assert parse_spec({"model": "m", "dataset": "d", "gpus": "4"}).gpus == 4


def test_a_spec_survives_json_and_is_frozen() -> None:
    spec = parse_spec({"model": "m", "dataset": "d", "deepspeed": "zero_pp", "training": {"max_steps": 3}})
    assert TrainingSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValueError, match="frozen"):
        spec.model = "other"  # type: ignore[misc]


def test_errors_survive_pickling() -> None:
    problem = Problem(id="X001", severity="error", field="gpus", message="no", fix="yes")
    again = pickle.loads(pickle.dumps(Refused([problem])))
    assert (str(again), again.problems) == (str(Refused([problem])), (problem,))
    failed = pickle.loads(pickle.dumps(TrainingFailed("cuda_oom", "too big", "smaller batch", "/run")))
    assert (failed.failure_class, failed.cause, failed.advice, failed.run_dir) == (
        "cuda_oom",
        "too big",
        "smaller batch",
        "/run",
    )
    assert str(failed).startswith("What to do: smaller batch\ncuda_oom: too big")


def test_every_field_says_what_it_is() -> None:
    def walk(model: Any) -> None:
        for name, field in model.model_fields.items():
            assert field.description, name
            assert field.title, name
            if hasattr(field.annotation, "model_fields"):
                walk(field.annotation)

    walk(TrainingSpec)


def test_contradictions_are_reported_with_everything_else() -> None:
    wrong = {
        "gpus": "many",
        "launcher": {"drill": "kill_rank", "timeout_min": -1},
        "training": {"learning_rat": 1},
    }
    with pytest.raises(Refused) as refused:
        parse_spec({"model": "m", "dataset": "d", "deepspeed": "zero2", "fsdp": "full_shard", **wrong})
    found = {problem.field: problem.message for problem in refused.value.problems}
    fields = {"deepspeed", "gpus", "launcher.allow_drill", "launcher.timeout_min", "training.learning_rat"}
    assert set(found) == fields
    assert "exclude each other" in found["deepspeed"]
    assert "fail on purpose" in found["launcher.allow_drill"]
    parse_spec({"model": "m", "dataset": "d", "launcher": {"drill": "kill_rank", "allow_drill": True}})


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"training": {"lr": 1e-4}}, "here it is training.learning_rate"),
        ({"gradient_accumulation_steps": 4}, "here it is training.global_batch_size"),
        ({"base_model": "x"}, "here it is model"),
        ({"training": {"max_seq_length": 4096}}, "here it is data.max_length"),
        ({"lora": {"lora_alpha": 16}}, "here it is lora.alpha"),
        ({"training": {"load_in_4bit": True}}, "here it is training.method=qlora"),
        ({"learning_rate": 1e-4}, "did you mean training.learning_rate?"),
        ({"training": {"packing": True}}, "did you mean data.packing?"),
        ({"training": {"deepspeed": "zero2"}}, "did you mean deepspeed?"),
        ({"training": {"lerning_rate": 1}}, "did you mean 'learning_rate'?"),
    ],
)
def test_words_of_other_tools_and_misplaced_settings(values: dict[str, Any], fix: str) -> None:
    (problem,) = refused(**values).problems
    assert problem.fix.startswith(fix)


def test_every_other_word_leads_to_a_setting() -> None:
    for word, known in OTHER_WORDS.items():
        group, _, name = known.split(" ")[0].split("=")[0].partition(".")
        field = TrainingSpec.model_fields[group]
        fields = TrainingSpec.model_fields if not name else field.annotation.model_fields  # type: ignore[union-attr]
        assert (name or group) in fields
        assert word not in fields
