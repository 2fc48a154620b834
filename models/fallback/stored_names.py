"""The names that published checkpoints have for a module's parameters, by transformers' own table of conversions."""

from typing import Any

from compiled_llm.models.fallback.attention import Unsupported

# Of a parameter of all experts: what is done to the tensors of each, one for each expert and part.
_OF_EXPERTS = (["MergeModulelist", "Concatenate"], ["MergeModulelist"])


class StoredNames:
    """Of the parameters of ``model``, a module of transformers."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        rules = get_model_conversion_mapping(model, add_legacy=False)[::-1]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if not isinstance(rule, WeightConverter | PrefixChange)]
        self._renamings = [rule.reverse_transform() for rule in renamings]

    def of(self, parameter: str) -> str:
        """The name of a parameter that is one tensor of a checkpoint. ``Unsupported`` for another."""
        if self._converter(parameter) is not None:
            raise Unsupported(f"a parameter that checkpoints hold otherwise, {parameter}")
        for rule in self._renamings:
            parameter, _ = rule.rename_source_key(parameter)
        return parameter

    def of_experts(self, parameter: str) -> tuple[str, ...] | None:
        """Names of the parts of a parameter of all experts, without ".weight" and with "*" for an expert's number.

        None where a checkpoint has one tensor for all; empty where it has them in another way than one by one.
        """
        rule = self._converter(parameter)
        if rule is None:
            return None
        if [type(step).__name__ for step in rule.operations] not in _OF_EXPERTS:
            return ()
        begin = parameter.removesuffix(rule.target_patterns[0])
        return tuple(self._renamed(f"{begin}{source}") for source in rule.source_patterns)

    def _renamed(self, name: str) -> str:
        # The rules go by whole names: a number takes the place of the star meanwhile.
        begin, _, end = name.partition("*")
        renamed = f"{begin}0{end}"
        for rule in self._renamings:
            renamed, _ = rule.rename_source_key(renamed)
        return f"{renamed.removesuffix(f'0{end}')}*{end}".removesuffix(".weight")

    def _converter(self, parameter: str) -> Any:
        found = (rule for rule in self._converters if parameter.endswith(rule.target_patterns[0]))
        return next(found, None)
