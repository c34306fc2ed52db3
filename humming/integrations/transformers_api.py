"""What is used of transformers, of the versions that have it in the way that is expected here."""

import re

OLDEST, TOO_NEW = (5, 9), (6, 0)
_NEEDED = (
    f"transformers {'.'.join(map(str, OLDEST))} or later, before {TOO_NEW[0]}; install it with "
    "pip install 'humming-kernels[transformers]'"
)

try:
    import transformers
except ImportError as error:
    raise ImportError(f"humming.integrations.transformers needs {_NEEDED}") from error


def check_version(version: str) -> None:
    """Refuse a version of transformers that loads models in another way.

    Raises:
        ImportError: with the versions that are possible.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= found < TOO_NEW:
        raise ImportError(f"humming.integrations.transformers needs {_NEEDED}; here is {version}")


check_version(transformers.__version__)

from transformers.core_model_loading import (  # noqa: E402
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers.auto import (  # noqa: E402
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

__all__ = [
    "AUTO_QUANTIZATION_CONFIG_MAPPING",
    "AUTO_QUANTIZER_MAPPING",
    "ConversionOps",
    "HfQuantizer",
    "QuantizationConfigMixin",
    "WeightConverter",
    "WeightRenaming",
    "register_quantization_config",
    "register_quantizer",
    "rename_source_key",
]
