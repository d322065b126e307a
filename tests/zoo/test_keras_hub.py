"""Converters of KerasHub, observed: a few of those that benchmarks/zoo runs."""

import pkgutil

import pytest

pytest.importorskip("keras_hub")
pytest.importorskip("transformers.conversion_mapping")

from benchmarks.zoo.__main__ import observed
from benchmarks.zoo.keras_hub import CLASSES, conversions_of

pytestmark = pytest.mark.filterwarnings("default")  # they are KerasHub's, of other versions


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma4ForCausalLM"])
def test_both_directions_become_rules(name):
    rows = [observed(each, None) for each in conversions_of(name)]
    assert [(row["result"], row["wrong"]) for row in rows] == [("rules", 0)] * 2, rows
    assert not any("inverse" in row for row in rows), rows


@pytest.mark.parametrize(
    "name", ["BartModel", "EsmModel", "SwinModel", "T5Gemma2ForConditionalGeneration"]
)
def test_what_has_a_model_of_its_own_becomes_rules(name):
    (row,) = [observed(each, None) for each in conversions_of(name)]
    assert (row["result"], row["wrong"]) == ("rules", 0), row


@pytest.mark.parametrize(
    ("name", "refused", "why"),
    [
        ("XLMRobertaModel", 1, "position_embedding/embeddings' depends on values"),  # a sum of two
        ("GptOssForCausalLM", 6, "experts/gate_up_proj' depends on values"),  # 4 bits a number
        ("Sam3VideoModel", 1, "an element is copied to several places of one array"),
    ],
)
def test_what_no_rule_makes_is_refused(name, refused, why):
    (row,) = [observed(each, None) for each in conversions_of(name)]
    assert (row["result"], row["refused"], row["wrong"]) == ("partly", refused, 0), row
    assert why in row["why"], row


def test_every_converter_and_exporter_has_a_class():
    import transformers
    from keras_hub.src.utils import transformers as package
    from keras_hub.src.utils.transformers.export import hf_exporter
    from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader

    types = [getattr(transformers, name).config_class.model_type for name in CLASSES]
    found = {TransformersPresetLoader("", {"model_type": each}).converter for each in types}
    modules = {each.__name__.rpartition(".")[2] for each in found}
    there = {each.name for each in pkgutil.iter_modules(package.__path__)}
    assert modules == {name for name in there if name.startswith("convert_")}
    backbones = {converter.backbone_cls.__name__ for converter in found}
    assert {*hf_exporter.MODEL_EXPORTERS} <= backbones
