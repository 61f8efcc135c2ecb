"""A search space in Optuna's terms: one distribution a parameter, named ``template.parameter``.

The template is the first parameter and each template's own parameters hang under it. Ordered
parameters are integers, the index of their value; nominal ones are categorical.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from optuna.distributions import CategoricalDistribution, IntDistribution

from ...kernels.base import Config, ParameterValue
from ...search_spaces.parameters import Parameter
from ...search_spaces.space import JointSpace

__all__ = ["FAILED_VALUE", "FOREIGN", "TEMPLATE", "OptunaTerms"]

Distribution = IntDistribution | CategoricalDistribution
TEMPLATE = "template"
FOREIGN = "foreign"
"""Attribute of a trial: whether its config is a foreign winner."""
FAILED_VALUE = 27.6
"""Objective of a trial without a time, where others have the logarithm of their microseconds:
slower than anything that runs (11 days), so that it is avoided."""


class OptunaTerms:
    """Translates between configs of a space and Optuna's parameters and distributions."""

    def __init__(self, space: JointSpace) -> None:
        templates = CategoricalDistribution([part.template for part in space.spaces])
        self.all_distributions: dict[str, Distribution] = {TEMPLATE: templates}
        self._parameters: dict[str, dict[str, Parameter]] = {}
        # Optuna leaves a parameter with one choice out of what its samplers propose.
        self._default_template = space.spaces[0].template
        for part in space.spaces:
            self._parameters[part.template] = {p.name: p for p in part.parameters}
            for parameter in part.parameters:
                self.all_distributions[self.name(part.template, parameter)] = _of(parameter)

    @staticmethod
    def name(template: str, parameter: Parameter) -> str:
        """What Optuna calls the parameter."""
        return f"{template}.{parameter.name}"

    def params(self, config: Config) -> dict[str, ParameterValue]:
        """The config as Optuna holds it."""
        params: dict[str, ParameterValue] = {TEMPLATE: config.template}
        known = self._parameters[config.template]
        for name, value in config.values:
            parameter = known[name]
            param = parameter.values.index(value) if parameter.is_ordered else value
            params[self.name(config.template, parameter)] = param
        return params

    def distributions(self, config: Config) -> dict[str, Distribution]:
        """The distributions of exactly the parameters that the config has."""
        return {name: self.all_distributions[name] for name in self.params(config)}

    def config(self, params: Mapping[str, Any]) -> Config:
        """The config that Optuna holds as ``params``; those of other templates do not count."""
        template = str(params.get(TEMPLATE, self._default_template))
        values = {
            parameter.name: self.value(parameter, params[name])
            for parameter in self._parameters[template].values()
            if (name := self.name(template, parameter)) in params
        }
        return Config.of(template, values)

    @staticmethod
    def value(parameter: Parameter, param: Any) -> ParameterValue:
        """The parameter's value that Optuna holds as ``param``."""
        if parameter.is_ordered:
            return parameter.values[int(param)]
        return parameter.values[parameter.values.index(cast("ParameterValue", param))]


def _of(parameter: Parameter) -> Distribution:
    if parameter.is_ordered:
        return IntDistribution(0, len(parameter.values) - 1)
    return CategoricalDistribution(parameter.values)
