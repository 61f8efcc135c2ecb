"""What a search space holds, as plain data: parameters, constraints, sizes, first configs."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..search_spaces.parameters import Parameter
from ..search_spaces.registry import joint_space
from ..search_spaces.space import SearchSpace

__all__ = ["SpaceDescription", "TemplateSpace", "describe_spaces"]


@dataclass(frozen=True)
class TemplateSpace:
    """The space of one template."""

    template: str
    product_size: int
    """Configs before constraints."""
    valid_size: int
    parameters: tuple[Parameter, ...]
    refused: tuple[tuple[str, int], ...]
    """(constraint, configs it is the first to refuse), in the order of checking."""
    configs: tuple[tuple[str, dict[str, object]], ...]
    """(``default`` or ``seed``, values): what a search tries first."""

    def parameter_rows(self) -> list[dict[str, object]]:
        """One row a parameter."""
        return [
            {
                "template": self.template,
                "parameter": parameter.name,
                "kind": "ordered" if parameter.is_ordered else "nominal",
                "values": list(parameter.values),
                "condition": _condition(parameter),
            }
            for parameter in self.parameters
        ]

    def constraint_rows(self) -> list[dict[str, object]]:
        """One row a constraint."""
        return [
            {"template": self.template, "constraint": name, "refuses": count}
            for name, count in self.refused
        ]

    def config_rows(self) -> list[dict[str, object]]:
        """One row a config that a search tries first."""
        return [
            {"template": self.template, "first": kind, "config": values}
            for kind, values in self.configs
        ]


@dataclass(frozen=True)
class SpaceDescription:
    """The spaces of every template that can serve the problem on the device."""

    problem: Problem
    gpu: str
    spaces: tuple[TemplateSpace, ...]

    def size_rows(self) -> list[dict[str, object]]:
        """One row a template."""
        return [
            {
                "template": space.template,
                "product_size": space.product_size,
                "valid_size": space.valid_size,
            }
            for space in self.spaces
        ]

    def as_dict(self) -> dict[str, object]:
        """Everything, as JSON values."""
        return {
            "op": self.problem.op,
            "gpu": self.gpu,
            "problem": self.problem.as_dict(),
            "templates": [
                {
                    "template": space.template,
                    "product_size": space.product_size,
                    "valid_size": space.valid_size,
                    "parameters": [_without_template(r) for r in space.parameter_rows()],
                    "constraints": [_without_template(r) for r in space.constraint_rows()],
                    "first_configs": [_without_template(r) for r in space.config_rows()],
                }
                for space in self.spaces
            ],
        }


def describe_spaces(problem: Problem, device: DeviceSpec) -> SpaceDescription:
    """Describes the space of each template that supports the problem on the device.

    Raises:
        UnsupportedError: none does.
    """
    spaces = joint_space(problem, device).spaces
    return SpaceDescription(problem, device.sku, tuple(_describe(space) for space in spaces))


def _describe(space: SearchSpace) -> TemplateSpace:
    product_size, refused = space.product_size(), space.refusals()
    return TemplateSpace(
        template=space.template,
        product_size=product_size,
        valid_size=product_size - sum(refused.values()),
        parameters=space.parameters,
        refused=tuple(refused.items()),
        configs=tuple(
            ("default" if config == space.default else "seed", dict(config.as_dict()))
            for config in space.valid_seeds()
        ),
    )


def _condition(parameter: Parameter) -> str | None:
    condition = parameter.active_when
    if condition is None:
        return None
    return f"{condition.parent} is {' or '.join(map(str, condition.values))}"


def _without_template(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != "template"}
