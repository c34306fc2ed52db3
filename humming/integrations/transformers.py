"""humming as a quantizer of Hugging Face transformers.

Importing this module makes the method `humming` known to transformers, for models to be quantized
while they are loaded and for those saved afterwards. Checkpoints of other methods are loaded by
transformers' own quantizers until `enable` is called.
"""

from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any

from humming.errors import UnsupportedError
from humming.integrations.hf_quantizer import HummingHfQuantizer
from humming.integrations.humming_config import METHOD, HummingConfig
from humming.integrations.transformers_api import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

__all__ = ["OTHER_METHODS", "HummingConfig", "HummingHfQuantizer", "enable"]

OTHER_METHODS = (
    *("gptq", "awq", "auto-round", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp8"),
    *("w4afp8", "modelopt", "quark", "bitnet"),
)
"""Values of `quant_method` that `enable` can take over."""

register_quantization_config(METHOD)(HummingConfig)
register_quantizer(METHOD)(HummingHfQuantizer)


def enable(*methods: str) -> ExitStack:
    """Lets transformers load checkpoints of other methods with humming from now on.

    transformers has one quantizer for each method, so that this is for the process and not for one
    model. It ends with the `with` block that the result may stand in, or its `close()`:

        with enable("gptq"):
            model = AutoModelForCausalLM.from_pretrained(path)

    Args:
        methods: of `OTHER_METHODS`; none for all.

    Raises:
        UnsupportedError: a method is none of these.
    """
    for method in methods:
        if method not in OTHER_METHODS:
            raise UnsupportedError(
                f"enable({method!r})",
                "no checkpoint of linear layers is read of this method",
                f"Possible: {', '.join(OTHER_METHODS)}.",
            )
    undo = ExitStack()
    ours = (
        (AUTO_QUANTIZATION_CONFIG_MAPPING, HummingConfig),
        (AUTO_QUANTIZER_MAPPING, HummingHfQuantizer),
    )
    for method in methods or OTHER_METHODS:
        for mapping, entry in ours:
            undo.callback(_restore, mapping, method, mapping.get(method))
            mapping[method] = entry
    return undo


def _restore(mapping: MutableMapping[str, Any], method: str, entry: Any) -> None:
    if entry is None:
        mapping.pop(method, None)
    else:
        mapping[method] = entry
