"""The features of a step: those that every engine may have, and those that a program registers."""

from jserve.errors import ConfigError
from jserve.model.feature import StepFeature
from jserve.model.features.mask import MASK
from jserve.model.features.score import SCORE

FEATURES = (MASK, SCORE)
"""In the order of their names."""

_REGISTERED: dict[str, StepFeature] = {}


def register_feature(feature: StepFeature) -> None:
    """Have ``feature`` in engines that are built in this process from now on: requests ask for it by its
    name in ``SamplingParams.extra_args``. It replaces a registered one of the same name.

    Raises:
        ConfigError: the name is one of ``FEATURES``; ``field`` is name.
    """
    if feature in FEATURES:
        raise ConfigError(f"a step feature named {feature.name} is there already", field="name")
    _REGISTERED[feature.name] = feature


def registered() -> tuple[StepFeature, ...]:
    """The features that ``register_feature`` was given, in the order of their names."""
    return tuple(sorted(_REGISTERED.values()))
