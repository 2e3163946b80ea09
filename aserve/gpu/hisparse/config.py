"""The settings of HiSparse, by SGLang's names, and the KV memory that they give."""

from __future__ import annotations

import msgspec

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import LayerSpec

PARAM = "hisparse_config"


class HiSparseConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON object of --hisparse-config."""

    top_k: int | None = None  # None: the model's; no other value is possible
    device_buffer_size: int | None = None  # hot rows per request; None: twice top_k
    host_to_device_ratio: float = 2.0  # host memory for KV, in units of the device's
    swap_in_block_size: int | None = None  # of SGLang's kernel; it changes nothing here
    backup_interval: int = 1  # steps whose new rows are copied to the host together

    @classmethod
    def of(cls, text: str) -> HiSparseConfig:
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            example = '{"device_buffer_size": 4096, "host_to_device_ratio": 4}'
            raise ConfigError(
                f"--hisparse-config: {error}; expected a JSON object such as {example}", param=PARAM
            ) from None

    def num_hot(self, layers: tuple[LayerSpec, ...]) -> int:
        """Returns the hot rows of a request, after a check of the settings against the model."""
        top_k = layers[0].index_top_k if layers else 0
        if not top_k:
            raise ConfigError(
                "--enable-hisparse needs a model with sparse attention, such as DeepSeek-V3.2; "
                "leave it out",
                param="enable_hisparse",
            )
        if self.top_k not in (None, top_k):
            raise ConfigError(
                f"--hisparse-config: top_k is {self.top_k}, but the model's queries attend to "
                f"{top_k} keys; leave it out",
                param=PARAM,
            )
        size = 2 * top_k if self.device_buffer_size is None else self.device_buffer_size
        if size < top_k or self.backup_interval < 1 or self.host_to_device_ratio <= 0:
            raise ConfigError(
                f"--hisparse-config: device_buffer_size must be at least the model's top_k "
                f"({top_k}), backup_interval at least 1 and host_to_device_ratio above 0; they are "
                f"{size}, {self.backup_interval} and {self.host_to_device_ratio}",
                param=PARAM,
            )
        return size


def refuse_beside_hisparse(draft_layers: tuple[LayerSpec, ...], *, two_batches: bool) -> None:
    """Raises ConfigError for what would read the host's KV, or would begin two forwards at once."""
    if any(layer.kv_layer is not None for layer in draft_layers):
        raise ConfigError(
            "--enable-hisparse does not support a drafter that reads the model's KV; use another "
            "--speculative-algorithm, or leave one of the two out",
            param="enable_hisparse",
        )
    if two_batches:
        raise ConfigError(
            "--enable-hisparse does not support --enable-two-batch-overlap; leave one of them out",
            param="enable_hisparse",
        )
