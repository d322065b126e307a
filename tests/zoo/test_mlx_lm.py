"""`sanitize` of mlx-lm, observed: a few of the models that benchmarks/zoo runs."""

import contextlib
import importlib
import json
import pkgutil

import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("transformers.conversion_mapping")

import mlx_lm.models

from benchmarks.zoo import table
from benchmarks.zoo.__main__ import observed
from benchmarks.zoo.mlx_lm import conversion_of, model_of, parameters
from benchmarks.zoo.mlx_models import MODELS


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "gpt_neox",
        "qwen3_moe",
        "dbrx",
        "deepseek_v41",
        "hunyuan-dense",
        "kimi_k3",
        "longcat_flash_ngram",
        "rwkv7",
        "step3p5",
    ],
)
def test_it_becomes_rules(name):
    conversion = conversion_of(name)
    assert conversion is not None
    row = observed(conversion, None)
    assert (row["result"], row["wrong"]) == ("rules", 0), row


@pytest.mark.parametrize("name", ["baichuan_m1", "bailing_moe-norm_head"])
def test_a_head_that_is_normalized_depends_on_values_and_nothing_else_does(name):
    row = observed(conversion_of(name), None)
    assert (row["result"], row["refused"], row["wrong"]) == ("partly", 1, 0), row
    assert row["why"].startswith("'lm_head.weight' depends on values"), row


def test_bytes_of_mxfp4_become_numbers_that_no_rule_makes():
    row = observed(conversion_of("gpt_oss-mxfp4"), None)
    assert (row["result"], row["refused"], row["wrong"]) == ("partly", 9, 0), row
    assert "experts.down_proj.weight' depends on values" in row["why"], row


@pytest.mark.parametrize("name", sorted({*MODELS} - {"gpt_oss-mxfp4"}))
def test_what_is_told_of_the_hub_gives_all_parameters(name):
    conversion, model = conversion_of(name), model_of(name)
    made = conversion.function(conversion.example)
    assert {key: x.shape for key, x in made.items()} == parameters(model)


def test_every_model_has_a_row():
    rows = json.loads((table.RESULTS / "mlx_lm.json").read_text())
    there = {row["name"].partition("/")[0] for row in rows}
    classes = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)):
        with contextlib.suppress(SystemExit):  # olmo asks for a package, and has no `sanitize`
            module = importlib.import_module(f"mlx_lm.models.{name}")
            classes[name] = getattr(module, "Model", None)
    have = {name for name, model in classes.items() if hasattr(model, "sanitize")}
    assert len(have) == 98
    assert have <= there
